"""The words of a text as the keyword index counts them: without case, accents and English endings."""

import re
import unicodedata
from collections.abc import Mapping
from functools import lru_cache

_WORD = re.compile(r"([^\W_]{1,64})[^\W_]*")  # of longer words the beginning
_ACCENT = re.compile("[\u0300-\u036f]")
_STEMS_KEPT = 1 << 17
_ENDINGS_2 = {
    "ational": "ate", "tional": "tion", "enci": "ence", "anci": "ance", "izer": "ize", "bli": "ble", "alli": "al",
    "entli": "ent", "eli": "e", "ousli": "ous", "ization": "ize", "ation": "ate", "ator": "ate", "alism": "al",
    "iveness": "ive", "fulness": "ful", "ousness": "ous", "aliti": "al", "iviti": "ive", "biliti": "ble", "logi": "log",
}  # fmt: skip
_ENDINGS_3 = {"icate": "ic", "ative": "", "alize": "al", "iciti": "ic", "ical": "ic", "ful": "", "ness": ""}
_ENDINGS_4 = dict.fromkeys(
    ("al", "ance", "ence", "er", "ic", "able", "ible", "ant", "ement", "ment", "ent", "ou", "ism", "ate", "iti", "ous",
     "ive", "ize"), "",
) | {"sion": "s", "tion": "t"}  # fmt: skip


class _Kinds(dict[int, str]):
    """The kinds of letters by code: v for vowels, y for y, c for all others."""

    def __missing__(self, code: int) -> str:
        return "c"


_KINDS = _Kinds({ord(letter): "v" for letter in "aeiou"} | {ord("y"): "y"})


def words_of(text: str) -> list[str]:
    """Return the words of a text, runs of letters and digits, in order, cut to 64 characters."""
    if not text.isascii():
        text = _ACCENT.sub("", unicodedata.normalize("NFD", text))
    return _WORD.findall(text.lower())


@lru_cache(_STEMS_KEPT)
def stem(word: str) -> str:
    """Return the stem of a lower-case word by Porter's algorithm ("An algorithm for suffix stripping", 1980).

    Words of one or two letters are returned unchanged.
    """
    if len(word) < 3:
        return word
    if word.endswith(("sses", "ies")):
        word = word[:-2]
    elif word[-1] == "s" and word[-2] != "s":
        word = word[:-1]
    word = _without_participle(word)
    if word[-1] == "y" and "v" in _form(word[:-1]):
        word = f"{word[:-1]}i"
    for endings, measure in ((_ENDINGS_2, 0), (_ENDINGS_3, 0), (_ENDINGS_4, 1)):
        word = _replaced(word, endings, measure)
    if word[-1] == "e" and (_measure(word[:-1]) > 1 or (_measure(word[:-1]) == 1 and not _is_short(word[:-1]))):
        word = word[:-1]
    return word[:-1] if word.endswith("ll") and _measure(word) > 1 else word


def _without_participle(word: str) -> str:
    if word.endswith("eed"):
        return word[:-1] if _measure(word[:-3]) > 0 else word
    ending = "ed" if word.endswith("ed") else "ing"
    base = word.removesuffix(ending)
    if base == word or "v" not in _form(base):
        return word
    if base.endswith(("at", "bl", "iz")) or (_measure(base) == 1 and _is_short(base)):
        return f"{base}e"
    doubled = base[-2:-1] == base[-1] and base[-1] not in "aeioulsz"
    return base[:-1] if doubled else base


def _replaced(word: str, endings: Mapping[str, str], measure: int) -> str:
    """Replace the longest of these endings, if what precedes the replacement measures more than `measure`."""
    for size in range(min(7, len(word)), 1, -1):
        ending = endings.get(word[-size:])
        if ending is not None:
            stem = word[:-size] + (ending if measure else "")
            return word[:-size] + ending if _measure(stem) > measure else word
    return word


def _form(word: str) -> str:
    """Return c for each consonant and v for each vowel; y is a vowel behind a consonant."""
    form = word.translate(_KINDS)
    while (at := form.find("y")) >= 0:
        form = f"{form[:at]}{'v' if form[at - 1 : at] == 'c' else 'c'}{form[at + 1 :]}"
    return form


def _measure(word: str) -> int:
    """Return the number of changes from vowels to consonants."""
    return _form(word).count("vc")


def _is_short(word: str) -> bool:
    """Return whether a word ends with consonant, vowel, consonant, the last one not w, x or y."""
    return _form(word).endswith("cvc") and word[-1] not in "wxy"
