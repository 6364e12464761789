"""How dates, times, counters and ids look in a text.

Everything here errs on the side of seeing nothing: a number alone is content, until what stands
before it says that it counts something.
"""

from __future__ import annotations

import re
from typing import Final

_MONTHS: Final = (
    "January|February|March|April|May|June|July|August|September|October|November|December|"
    "Jan|Feb|Mar|Apr|Jun|Jul|Aug|Sept|Sep|Oct|Nov|Dec|"
    "Januar|Februar|März|Mai|Juni|Juli|Oktober|Dezember|"
    "janvier|février|mars|avril|mai|juin|juillet|août|septembre|octobre|novembre|décembre|"
    "enero|febrero|marzo|abril|mayo|junio|julio|agosto|septiembre|octubre|noviembre|diciembre|"
    "gennaio|febbraio|aprile|maggio|giugno|luglio|settembre|ottobre|dicembre|"
    "janeiro|fevereiro|março|maio|junho|julho|setembro|outubro|novembro|dezembro"
)
_DAYS: Final = (
    "Monday|Tuesday|Wednesday|Thursday|Friday|Saturday|Sunday|Mon|Tues|Tue|Wed|Thurs|Thu|Fri|Sat|"
    "Sun|Montag|Dienstag|Mittwoch|Donnerstag|Freitag|Samstag|Sonntag|"
    "lundi|mardi|mercredi|jeudi|vendredi|samedi|dimanche|"
    "lunes|martes|miércoles|jueves|viernes|sábado|domingo"
)
_CLOCK: Final = (
    r"(?:[01]?\d|2[0-3]):[0-5]\d(?::[0-6]\d(?:[.,]\d{1,9})?)?"
    r"(?:\s?[AaPp]\.?[Mm]\b\.?)?(?:\s?(?:Z\b|UTC|GMT|CES?T|[PMCE][SD]T|[+-]\d{2}:?\d{2}(?!\d)))?"
)
_YEAR: Final = r"(?:19|20)\d{2}"
_MONTH: Final = r"(?:0[1-9]|1[0-2])"
_DAY: Final = r"(?:0[1-9]|[12]\d|3[01])"
_PART_OF_MONTH: Final = r"(?:0?[1-9]|[12]\d|3[01])"
_EDGE: Final = r"(?<![\w.])"
_FULL: Final = (
    # 2025-03-01T10:15:00.123Z, and the same with a space, or without the time
    rf"{_EDGE}{_YEAR}-{_MONTH}-{_DAY}(?:[T ]{_CLOCK})?(?!\d)",
    rf"{_EDGE}{_YEAR}{_MONTH}{_DAY}(?:T?[-_]?[0-2]\d[0-5]\d(?:[0-6]\d)?Z?)?(?!\w)",
    rf"{_EDGE}{_YEAR}[/.](?:0?[1-9]|1[0-2])[/.]{_PART_OF_MONTH}(?!\d)",
    rf"{_YEAR}年\d{{1,2}}月(?:\d{{1,2}}日)?(?:\s?[(\uff08][月火水木金土日][)\uff09])?",
    rf"{_EDGE}{_YEAR}-W[0-5]\d(?:-[1-7])?(?!\w)",
    rf"(?i:\b(?:(?:current|this)\s+year\b\s*(?:is|:|=)?|(?<!\w )year\s*(?:is|:|=))\s*){_YEAR}\b",
    # how long something has been running; "up" alone says so only as `uptime` prints it
    r"(?i:\b(?:uptime|elapsed|running for)\b)[\s:=]*\d[\d.,:]*"
    r"(?:\s*(?:ms|s|secs?|seconds?|m|mins?|minutes?|h|hours?|d|days?)\b,?\s*[\d:.]*)*",
    r"\bup\s+\d+\s+days?,\s+(?:\d+:\d\d|\d+\s+min\b)",
    # 1/3/2025, 01.03.2025
    rf"{_EDGE}{_PART_OF_MONTH}(?P<sep>[/.-]){_PART_OF_MONTH}(?P=sep){_YEAR}(?![\w.]*\d)",
    # March 1st, 2025; Mar 1; March 2025
    rf"\b(?:{_MONTHS})\b\.?\s+{_PART_OF_MONTH}(?:st|nd|rd|th)?(?!\d|[:.]\d)(?:,?\s+{_YEAR}\b)?",
    rf"\b(?:{_MONTHS})\b\.?,?\s+{_YEAR}\b",
    # 1 March 2025, 1. März 2025, 1 de marzo de 2025
    rf"{_EDGE}{_PART_OF_MONTH}(?:st|nd|rd|th|er|\.|º)?\s+(?:de\s+|of\s+)?(?:{_MONTHS})\b\.?"
    rf"(?:,?\s+(?:de\s+|del\s+)?{_YEAR}\b)?",
    # a clock with seconds is no ratio
    r"(?<![\w:.])(?:[01]?\d|2[0-3]):[0-5]\d:[0-6]\d(?:[.,]\d{1,9})?(?:\s?[AaPp]\.?[Mm]\b)?",
)
DATES: Final = re.compile("|".join(f"(?:{each})" for each in _FULL))
"""Dates and times that are such wherever they stand."""

_HALF_OR_ZONE: Final = r"(?:[AaPp]\.?[Mm]\b|Z\b|UTC|GMT|CES?T|[PMCE][SD]T|[+-]\d{2}:?\d{2})"
_PERHAPS: Final = (
    # seconds and milliseconds since 1970, from 2001 to 2065
    rf"{_EDGE}(?:1\d|2\d)\d{{8}}(?:\d{{3}}|\.\d{{1,9}})?(?![\w.]*\d)",
    r"\b(?:\d+|an?|a few)\s+(?:second|minute|hour|day|week|month|year)s?\s+ago\b",
    r"\b(?:just now|yesterday|moments ago)\b",
    rf"(?<![\w:.])(?:[01]?\d|2[0-3]):[0-5]\d\s?{_HALF_OR_ZONE}",
    r"(?<![\w:.])(?:0?\d|1[0-2])\s?[AaPp]\.?[Mm]\b",
    r"(?<![\w:.])(?:[01]?\d|2[0-3])[:h][0-5]\d(?![\w:]*\d)",
    rf"{_EDGE}{_PART_OF_MONTH}(?P<sep>[/.-]){_PART_OF_MONTH}(?P=sep)\d{{2}}(?![\w.]*\d)",
)
PERHAPS_DATES: Final = re.compile("|".join(f"(?:{each})" for each in _PERHAPS))
"""A time, or else a ratio, a verse, a rule of the house, a limit: see `SAYS_TIME`."""

NAMED_DAYS: Final = re.compile(rf"\b(?:{_MONTHS}|{_DAYS})\b")
"""The name of a month or a weekday alone, which people have, too: see `SAYS_DAY`."""

_TODAY: Final = (
    "today|tonight|now|date|dated|as of|it is|heute|jetzt|datum|maintenant|ahora|aujourd'hui|"
    "fecha|hoy"
)
SAYS_TIME: Final = re.compile(
    rf"(?i)(?<![a-z])(?:{_TODAY}|currently|(?:current|local|server|system|utc) time|time|day|clock|"
    r"updated|modified|created|generated|started|since|month|timestamp|ts|epoch|last \w+|"
    r"uhr|uhrzeit|heure|hora)(?![a-z])[^\n]{0,40}$"
)
"""What stands before a time if it says when something is sent."""

SAYS_DAY: Final = re.compile(
    rf"(?i)(?<![a-z])(?:{_TODAY}|day|weekday|month|week)(?![a-z])\W{{0,4}}"
    r"(?:(?:is|it|it's|was|ist|es|est|der|the|le|of)\W{1,3}){0,3}$"
)
"""What stands right before the name of a day or a month if it is no other name."""

_UUID: Final = r"(?<![0-9A-Za-z])[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}(?!\w)"
_ULID: Final = r"(?<!\w)[0-7][0-9A-HJKMNP-TV-Z]{25}(?!\w)"
_HEX: Final = (
    r"(?<![\w.])(?:0x)?(?=[0-9]*[a-f])(?=[a-f]*[0-9])[0-9a-f]{7,64}(?!\w)"
    r"|(?<![\w.])(?:0x)?(?=[0-9]*[A-F])(?=[A-F]*[0-9])[0-9A-F]{7,64}(?!\w)"
)
_OWNERS: Final = (
    "call|toolu|tool|req|request|msg|message|chatcmpl|cmpl|run|sess|session|trace|span|thread|"
    "resp|response|conv|conversation|task|job|item|fc|rs|id|uid|user|tmp|nonce|corr|tx|evt|event|"
    "cache|build|x"
)
_PREFIXED: Final = (
    rf"(?i:(?<![A-Za-z0-9])(?:{_OWNERS}))[_-](?=[A-Za-z0-9_-]*\d)[A-Za-z0-9_-]{{4,}}(?!\w)"
)
_RANDOM: Final = (
    r"(?<![\w./-])(?=[\w-]*[a-z])(?=[\w-]*[A-Z])(?=[\w-]*\d[\w-]*\d)[A-Za-z0-9_-]{16,}={0,2}(?!\w)"
)
_TEMPORARY: Final = r"(?<![A-Za-z])tmp(?:\.[A-Za-z0-9]{6,12}|[a-z0-9_]{8})(?!\w)"
_NAMED: Final = (
    r"(?i:(?<![a-z])(?:request|session|trace|span|conversation|thread|correlation|transaction|"
    r"client|device|instance|message|run)[ _-]?(?:id|key|token|uuid)|(?<![a-z])(?:nonce|etag|"
    r"session|trace|request))[\"']?[ \t]*(?:[:=#]|is)[ \t]*[\"']?(?=[\w-]*\d)[\w-]{4,}"
)
IDS: Final = re.compile("|".join((_UUID, _ULID, _NAMED, _PREFIXED, _TEMPORARY, _HEX, _RANDOM)))
"""Ids that nobody chose: UUIDs, hashes, random letters, what tools call their calls."""

_NUMBER: Final = r"\d+(?:[.,]\d+)*"
_COUNTED: Final = (
    "request|req|turn|iteration|iter|attempt|retry|retries|invocation|sequence|seq|session|"
    "conversation|nonce|counter|tick|trace|span|pid|visit|seed"
)
_NUMBERED: Final = "message|msg|step|round|run|build|task|job|call|thread|poll|page view|user"
_ID_WORD: Final = r"(?:id|ids|no|nr|num|number|count|counter|index|idx)"
_GLUE: Final = r"""["']?[ \t]*(?:[:=#]+|is|no\.|\.)?[ \t]*["'#(]?"""
_MARK: Final = r"""["']?[ \t]*[:=#]+[ \t]*["'#(]?"""
_ENDS: Final = r"(?:[ \t]*(?:/|of[ \t])[ \t]*\d|(?!\d|[.,]\d|[ \t]*%|[ \t]+[^\W\d_]))"
_STANDS_ALONE: Final = r"\b(?![ \t]+(?!(?:in|for|until|before|on|today|this|so)\b)\w)"
COUNTERS: Final = re.compile(
    # a number that counts what follows it is none of what stands before it: "Turn 5 lights off"
    rf"(?i)(?<![a-z])(?:{_COUNTED})s?"
    rf"(?:[ _-]?{_ID_WORD}{_GLUE}|{_MARK}|{_GLUE}(?={_NUMBER}{_ENDS}))"
    rf"{_NUMBER}(?:[ \t]*(?:/|of)[ \t]*\d+)?"
    rf"|(?<![a-z])(?:{_NUMBERED})s?[ _-]?(?:{_ID_WORD}{_GLUE}|\#[ \t]?){_NUMBER}"
    rf"|(?<![a-z])(?:{_NUMBERED})s?[ \t]*[:#]?[ \t]*{_NUMBER}[ \t]*(?:/|of)[ \t]*\d+"
    rf"|(?<![a-z])(?:tokens?|requests?|messages?|turns?|steps?|budget|credits?|context)[ \t]+"
    rf"(?:\w+[ \t]+)?(?:used|left|remaining|so far|consumed|usage|count){_GLUE}\$?{_NUMBER}"
    rf"(?:[ \t]*(?:/|of)[ \t]*{_NUMBER})?%?"
    rf"|\$?{_NUMBER}(?:[ \t]*(?:/|of)[ \t]*\d[\d.,]*)?[ \t]*%?[ \t]+"
    r"(?:(?:tokens?|requests?|messages?|turns?|steps?|credits?)[ \t]+)?"
    rf"(?:used|left|remaining|so far|consumed){_STANDS_ALONE}"
)
"""A number and the word that says that it counts, or is an id of, something."""

NUMBERS: Final = re.compile(
    r"(?<![\w.])[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?:[eE][-+]?\d+)?(?!\w|\.\d)"
)
"""A decimal number that is no part of a version, a name or a list."""

ID_KEYS: Final = re.compile(
    r"(?i)(?:^|[._-])(?:id|ids|uuid|guid|nonce|counter|seq|sequence|request|session|trace|span|"
    r"cursor|etag|token_count|turn|iteration|attempt)$|(?:Id|ID|Uuid)$"
)
"""Names of fields that hold counters and ids."""

DATE_KEYS: Final = re.compile(
    r"(?i)(?:^|[._-])(?:date|time|timestamp|datetime|created|updated|modified|now|ts|expires|"
    r"elapsed)(?:_(?:at|on|ms|s|utc|time|date))?$|(?:At|Time|Date|Timestamp)$"
)
"""Names of fields that hold dates and times."""

SUMMARY: Final = re.compile(
    r"(?i)\bsummary of (?:the |our |this |your |all )?(?:previous |earlier |prior |preceding |"
    r"past |older )?(?:conversation|discussion|session|chat|history|messages|turns|work|context)"
    r"|\b(?:conversation|session|context|chat|history|progress) summary\b|<(?:\w+[_-])?summary>"
    r"|\bconversation so far\b|\bcontinued from (?:a|the) (?:previous|prior|earlier)\b"
    r"|\bprevious conversation\b|\b(?:earlier|previous|older|prior|preceding|\d+) (?:messages?|"
    r"turns?|conversation|history|context)\s+(?:(?:was|were|has been|have been)\s+)?"
    r"(?:omitted|removed|truncated|summari[sz]ed|compacted|condensed|elided|dropped)"
    r"|\b(?:conversation|history|context|session) (?:was|has been|is) (?:summari[sz]ed|compacted|"
    r"condensed|truncated)|\A\W{0,8}summary\b\s*[:\n]"
)
"""What a message says that stands for those that were there before."""

EMPTIED: Final = re.compile(
    r"(?i)\b(?:cleared|elided|truncated|omitted|removed|pruned|compacted|redacted|trimmed|"
    r"summari[sz]ed|snipped|hidden|no longer (?:available|shown))\b"
)
"""What is left of a message that was emptied."""
