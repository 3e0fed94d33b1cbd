"""Do two outputs of a cell say the same? Words alike, numbers within what another processor may round.

Looked at first: nbval, pytest-notebook and nbdime compare text by patterns or exactly, know no tolerance for
numbers, and start a kernel for each notebook. `notebooks.py` has both outputs in hand when a notebook ends.
"""
import re

RELATIVE = 0.02  # of two numbers; another processor's sums have other last digits, and training enlarges them
ROUNDING = 1e-5  # two errors below this are both float32 rounding
NUMBER = re.compile(r"(?<![\w.])[-+]?\d[\d,_]*(?:\.\d+)?(?:e[-+]\d\d?)?(?![0-9a-z_])", re.I)
PASSING = [  # what says nothing: addresses, lines of a source that moved, borders that grow with a number, colours
    (re.compile(r" at 0x[0-9a-f]{6,}"), ""), (re.compile(r"#L\d+"), ""), (re.compile(r"\x1b\[[0-9;]*m"), ""),
    (re.compile(r"'\w+_(?:runtime|per_second)': '?[\d.e-]+'?"), ""),  # seconds in a Trainer's log
    (re.compile(r"10\^-(\d+)"), r"1e-\1"),
    (re.compile(r"[-=─]{4,}|[│|\\]"), " ")]
MIMES = ("text/markdown", "text/plain")  # the first that an output has


def text_of(output):
    "What an output says; nothing for warnings, which differ from release to release."
    kind = output.get("output_type")
    if kind == "stream":
        return "" if output.get("name") == "stderr" else "".join(output["text"])
    if kind == "error":
        return f"{output['ename']}: {output['evalue']}"
    data = output.get("data", {})
    pictures = " ".join(mime for mime in sorted(data) if mime.startswith("image/"))
    if pictures:
        return pictures  # its pixels depend on fonts
    return next(("".join(data[mime]) for mime in MIMES if mime in data), "")


def tokens(outputs):
    "(words and signs, numbers as they are written) of all outputs of a cell."
    text = "\n".join(map(text_of, outputs))
    for pattern, instead in PASSING:
        text = pattern.sub(instead, text)
    return NUMBER.sub(" # ", text).split(), NUMBER.findall(text)


def step(written):
    "One in the last place of a number as it is written; 0 for a whole number, which is not rounded."
    mantissa, _, exponent = written.lower().partition("e")
    places = len(mantissa.partition(".")[2])
    if not places and not exponent:
        return 0
    return 10.0 ** (int(exponent or 0) - places)


def same_number(one, other):
    a, b = (float(n.replace(",", "").replace("_", "")) for n in (one, other))
    if abs(a - b) <= RELATIVE * max(abs(a), abs(b)):
        return True
    if max(abs(a), abs(b)) <= ROUNDING:
        return True
    return abs(a - b) <= 1.001 * min(step(one), step(other))  # 0.04 and 0.05 may be 0.0449 and 0.0451


def difference(stored, new):
    "None, or in words what another reader of the two outputs would see first."
    (words, numbers), (new_words, new_numbers) = tokens(stored), tokens(new)
    for i, (a, b) in enumerate(zip(words, new_words)):
        if a != b:
            return f"says {' '.join(new_words[max(i - 5, 0):i + 4])!r}, stored is {' '.join(words[max(i - 5, 0):i + 4])!r}"
    if len(words) != len(new_words):
        longer = max(words, new_words, key=len)
        more = " ".join(longer[min(len(words), len(new_words)):][:9])
        return f"says {'more' if longer is new_words else 'less'} than is stored: {more!r}"
    apart = [f"{b}, stored is {a}" for a, b in zip(numbers, new_numbers) if not same_number(a, b)]
    return f"{len(apart)} of {len(numbers)} numbers differ: " + "; ".join(apart[:6]) if apart else None
