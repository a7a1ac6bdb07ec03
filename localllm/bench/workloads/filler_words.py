"""Common English words by length: what filler is made of, since tokenizers cut letters at random twice as fine."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Final

_WORDS: Final = """
of to in is it as be by he we on at or an if so up me my no do go us am
the and for not you all can her was one our out day get has him his how man new now old see two way who boy did its
let put say she too use ask big car end far few got hot job key lot map nor off own pay red run sea set sit sun ten top
that with have this will your from they know want been good much some time very when come here just like long make many
more only over such take than them well were what year back call city done even face find four give hand head home hour
idea kind land last left life line list look mean most move name need next once open part plan play read rest room side
about after again among began below black bread bring build carry cause chair child clear close cloud color could cover
cross dance dream drive early earth eight every field final first floor found fresh front glass grass green group happy
heart horse house large later laugh learn leave level light local lunch might money month mouth music never night north
always animal answer around basket become before behind better bottle branch bridge bright butter called camera castle
centre change choose circle closed coffee common corner cotton county course danger decide degree dinner direct doctor
double during effect either energy engine enough family famous farmer father finger finish flower follow forest formal
another balance because between brother cabinet captain central certain chapter clothes collect company compare concert
contain control correct country courage current customs develop diamond distant drawing evening exactly example explain
feature finally fishing foreign forward freedom general grammar greatly harvest healthy herself history holiday however
although anything argument backward balanced baseball becoming birthday business calendar campaign capacity
ceremony champion children commonly complete computer consider constant contrast creative daughter decision delivery
describe dialogue directly distance division document dominant educated election employer everyone exchange exercise
advantage afternoon apartment attention authority available beautiful beginning breakfast carefully character childhood
chocolate classroom colourful community condition container continued dangerous democracy departure determine different
difficult direction discovery education elsewhere emergency equipment essential everybody excellent existence
absolutely additional adventures afterwards background basketball birthplace capability characters collection commercial
commission completely conditions conference connection consistent convention curriculum definitely department difference
discussion especially everything experience expression friendship generation government importance impossible individual
appointment appropriate association calculation certificate combination comfortable competition complicated
concentrate connections consequence considering corporation description destination development
differences discoveries distributed educational electricity environment established examination
"""


@cache
def words_by_length() -> Mapping[int, tuple[str, ...]]:
    """Return length in letters -> words of that length; every length from 2 to the longest is there."""
    found: dict[int, list[str]] = {}
    for word in dict.fromkeys(_WORDS.split()):
        found.setdefault(len(word), []).append(word)
    return MappingProxyType({length: tuple(words) for length, words in sorted(found.items())})
