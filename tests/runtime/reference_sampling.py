"""The filters written plainly, in float64 over dictionaries: what the fast ones are compared with."""

from __future__ import annotations

import itertools
import math

from localllm.runtime.sampling_params import Sampling

Logits = dict[int, float]

NEAR = 1e-5


class NearBoundary(Exception):
    """A value within rounding of a cut: either answer would be right."""


def probabilities(left: Logits, temperature: float = 1.0) -> dict[int, float]:
    best = max(left.values())
    weights = {token: math.exp((logit - best) / temperature) for token, logit in left.items()}
    total = math.fsum(weights.values())
    return {token: weight / total for token, weight in weights.items()}


def at_least(left: Logits, value: dict[int, float], limit: float) -> Logits:
    if any(abs(v - limit) < NEAR and not v == limit == max(value.values()) for v in value.values()):
        raise NearBoundary
    return {token: logit for token, logit in left.items() if value[token] >= limit}


def until_mass(left: Logits, order: list[int], mass: float) -> Logits:
    """Keep the front of `order` up to the token with which it holds `mass`."""
    p = probabilities(left)
    held, kept = 0.0, []
    for token in order:
        if kept and abs(held - mass) < NEAR:
            raise NearBoundary
        if kept and held >= mass:
            break
        held += p[token]
        kept.append(token)
    return {token: left[token] for token in left if token in kept}


def best_first(left: Logits) -> list[int]:
    return sorted(left, key=lambda token: (-left[token], token))


def top_n_sigma(left: Logits, n: float) -> Logits:
    mean = math.fsum(left.values()) / len(left)
    sigma = math.sqrt(math.fsum((logit - mean) ** 2 for logit in left.values()) / len(left))
    return at_least(left, left, max(left.values()) - n * sigma)


def top_k(left: Logits, k: int) -> Logits:
    kept = best_first(left)[:k]
    return {token: left[token] for token in left if token in kept}


def typical(left: Logits, mass: float) -> Logits:
    p = probabilities(left)
    entropy = -math.fsum(v * math.log(v) for v in p.values())
    far = {token: round(abs(-math.log(v) - entropy), 9) for token, v in p.items()}
    gaps = sorted(set(far.values()))
    if any(b - a < NEAR for a, b in itertools.pairwise(gaps)):
        raise NearBoundary
    return until_mass(left, sorted(left, key=lambda token: (far[token], token)), mass)


def top_p(left: Logits, mass: float) -> Logits:
    return until_mass(left, best_first(left), mass)


def min_p(left: Logits, share: float) -> Logits:
    return at_least(left, left, max(left.values()) + math.log(share))


def xtc(left: Logits, threshold: float) -> Logits:
    likely = at_least(left, probabilities(left), threshold)
    order = best_first(likely)
    return {token: logit for token, logit in left.items() if token not in order[:-1]}


def truncate(left: Logits, sampling: Sampling, *, xtc_acts: bool = False) -> Logits:
    """The whole chain in its documented order."""
    if sampling.top_n_sigma > 0:
        left = top_n_sigma(left, sampling.top_n_sigma)
    if sampling.top_k > 0:
        left = top_k(left, sampling.top_k)
    if sampling.typical_p < 1:
        left = typical(left, sampling.typical_p)
    if sampling.top_p < 1:
        left = top_p(left, sampling.top_p)
    if sampling.min_p > 0:
        left = min_p(left, sampling.min_p)
    if xtc_acts:
        left = xtc(left, sampling.xtc_threshold)
    return left


def target(logits: list[float], sampling: Sampling) -> dict[int, float]:
    """The distribution the sampler must draw from, XTC's coin averaged out."""
    left = dict(enumerate(logits))
    result = dict.fromkeys(left, 0.0)
    for acts, share in ((False, 1 - sampling.xtc_probability), (True, sampling.xtc_probability)):
        if share > 0:
            kept = truncate(left, sampling, xtc_acts=acts)
            for token, p in probabilities(kept, sampling.temperature).items():
                result[token] += share * p
    return result


def dry(context: list[int], sampling: Sampling, pieces: list[bytes]) -> dict[int, float]:
    """The penalty by token: compare the end of the text with every earlier place, token by token."""
    breakers = [text.encode() for text in sampling.dry_sequence_breakers]

    def breaks(index: int) -> bool:
        for breaker in breakers:
            before = b"".join(pieces[token] for token in context[:index])
            text = before + pieces[context[index]]
            at = [i for i in range(len(text)) if text.startswith(breaker, i)]
            if any(len(before) < i + len(breaker) <= len(text) for i in at):
                return True
        return False

    longest: dict[int, int] = {}
    for end in range(len(context) - 1):
        length = 0
        while length <= end and context[end - length] == context[-1 - length] and not breaks(len(context) - 1 - length):
            length += 1
        token = context[end + 1]
        longest[token] = max(length, longest.get(token, 0))
    return {
        token: sampling.dry_multiplier * sampling.dry_base ** (length - sampling.dry_allowed_length)
        for token, length in longest.items()
        if length >= sampling.dry_allowed_length and not any(breaker in pieces[token] for breaker in breakers)
    }
