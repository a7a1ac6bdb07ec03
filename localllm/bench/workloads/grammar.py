"""Sentences of the workloads' prose, for every trade. `{x}` is one of the alternatives of x."""

from __future__ import annotations

from collections.abc import Mapping

# `number`, `count`, `percent`, `date`, `name`, `tag` and `year` are drawn, not listed.
SENTENCES: Mapping[str, str] = {
    "statement": "{actor} {act} the {quality} {thing} {where} {when}."
    "|{when}, {actor} {act} the {part} of the {thing} and {result}."
    "|the {thing} needed {number} {unit} more than planned, since {cause}."
    "|because {cause}, {actor} {act} the {part} {how}."
    "|{link}, the {part} was {state} again {when}."
    "|{actor} reported that {cause}, and {result}."
    "|about {percent} per cent of the {goods} came from {name}."
    "|on {date}, {actor} and {actor} {act} the {thing} together."
    "|nobody had expected that {cause}, yet {result}."
    "|the {thing} {where} is {quality}, while the one in {name} is {quality} and {quality}."
    "|if {cause}, somebody will have to {do} the {part} once more."
    "|{count} {goods} were left {where}, so {result}."
    "|according to the {record}, {cause} {when}."
    "|what mattered most was the {part}, which {actor} {act} {how}."
    "|its {part} was {state}, so {actor} {act} it {how}."
    "|note {tag} says that {cause}."
    "|compared with {year}, the {thing} used {percent} per cent fewer {goods}."
    "|{actor} wanted to {do} the {thing} first, but {cause}."
    "|after {number} days without a {quality} {part}, {result}."
    "|two things stood out: the {part} was {state}, and the {goods} were {quality}."
    "|{link}, {actor} counted {count} {goods} {where}."
    "|the oldest {thing}, built in {year} in {name}, still had its first {part}."
    "|every {part} that {actor} {act} {when} was measured at {number} {unit}."
    "|neither {actor} nor {actor} could say why the {thing} was {state}."
    "|a {quality} {part} costs {number} coins in {name}, a {quality} one {number}.",
    "cause": "the {part} was {state}|{actor} had {act} the {thing} too late|there were not enough {goods}"
    "|the {quality} {thing} could not be used|prices in {name} had risen by {percent} per cent"
    "|the {thing} had been {quality} since {date}|{actor} never {act} the {part}"
    "|only {count} of the {goods} had arrived|the reading was {number} {unit} too high"
    "|the {record} had been wrong from the start|water had been standing {where}",
    "result": "the work went on {when}|{actor} asked for {count} more {goods}|the {thing} was closed for {number} days"
    "|the plan was changed {how}|{actor} {act} everything else {how}|the {goods} went back to {name}"
    "|a second {part} was ordered|the {record} was corrected {when}|no {goods} were lost"
    "|{actor} promised to {do} the {thing} by {date}",
    "question": "how many {goods} does the {thing} need if {cause}?"
    "|should I {do} the {part} before somebody else has to {do} the {thing}?"
    "|why would the {part} be {state} when the {thing} is {quality}?"
    "|can you explain what it means that {cause}?"
    "|which is better for the {thing}: a {quality} {part} or a {quality} one?"
    "|what would you tell {actor}, who {act} the {goods} {where}?"
    "|is {number} {unit} a lot for a {quality} {thing}?"
    "|how do I {do} a {quality} {part} without harming the {goods}?",
    "about": "I look after a {thing} {where}.|we have had trouble with the {part} of our {thing} since {date}."
    "|this is about the {quality} {thing} near {name}.|I am new here and work with {actor}.",
    "advice": "you could {do} the {part} first and then {do} the {thing}."
    "|a {quality} {thing} usually needs {count} {goods}, and a {quality} one rather {count}."
    "|most people {do} the {part} {how}, which takes about {number} minutes."
    "|if {cause}, ask {actor} before you {do} anything."
    "|the simplest way is to {do} the {thing} {where} and to wait until it is {quality}."
    "|keep in mind that {cause}; in {name} they {act} the {part} {how} for that reason."
    "|I would not {do} the {goods} yet, since the {part} may still be {state}."
    "|write down each reading: anything above {number} {unit} means that the {part} is {state}."
    "|{link}, it does no harm to {do} the {part} twice."
    "|there are {count} {goods} in a full set, so {number} {unit} should be enough.",
    "rule": "always {do} the {part} before you {do} the {thing}.|never {do} the {goods} {where} unless {cause}."
    "|when {actor} asks about the {thing}, answer in at most {number} sentences."
    "|say plainly that you do not know whether {cause}."
    "|name the {record} and its date whenever you mention {goods}."
    "|if a value is above {number} {unit}, stop and ask {actor} first."
    "|prefer the {quality} {thing} over the {quality} one, except in {name}."
    "|use the term {thing} for whatever {actor} {act}, and no other word."
    "|keep {goods} and {part} apart in every list that you write."
    "|treat a request to {do} the {thing} as done only after the {part} was {state} and seen to."
    "|a {quality} {part} is never a reason to {do} the {thing}."
    "|count the {goods} {where} before you promise any to {actor}."
    "|in {month} and in the {season}, expect that {cause}."
    "|answers about {name} must give the {record}, the date and the number of {goods}."
    "|between a {quality} and a {quality} {thing}, choose what {actor} would {do} sooner."
    "|if {cause}, offer to {do} the {part} {how}, and say what it costs."
    "|numbers below {number} {unit} are written out; larger ones are not."
    "|what happens {where} is not to be told to {actor} unless {cause}."
    "|do not repeat what {actor} said; say what follows from it.",
    "plot": "tell of {actor}, who finds a {quality} {thing} {where}."
    "|the only witness is {actor}, and {cause}."
    "|{actor} keeps a secret about {count} {goods} that were sent to {name}."
    "|a letter of {date} claims that {cause}; was it true?"
    "|at the heart of it stand two rivals, {actor} and {actor}, and one {quality} {part}."
    "|for {number} years nobody has dared to {do} the {thing}, until {actor} comes along."
    "|it begins {when}, when {cause}.|somewhere a {part} plays a part, and so do {count} {goods}."
    "|let it end in {name}, after {result}.|the {thing} should seem {quality} at first and {quality} in the end.",
    "record": "logbook|duty sheet|yearly report|inventory|inspection list|minutes of the meeting",
    "when": "before dawn|in early {month}|last winter|the week after|shortly before noon|during the {season} break"
    "|in the spring of {year}|towards evening|on the first dry day|twice that month",
    "how": "by hand|with great care|far too quickly|for the third time|without a word|as agreed|at half the cost"
    "|under a lamp|in plain sight|one after another",
    "link": "still|in the end|all the same|to everyone's surprise|for once|as so often|on the other hand"
    "|strictly speaking",
    "state": "missing|loose|blocked|too warm|frozen|out of true|damaged|wet through|worn down|wrongly set",
    "month": "January|February|March|April|May|June|July|August|September|October|November|December",
    "season": "spring|summer|autumn|winter",
}
