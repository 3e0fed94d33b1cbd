"""Do two outputs of a cell say the same? Words alike, numbers within what another processor may round.

Looked at first: nbval, pytest-notebook and nbdime compare text by patterns or exactly, know no tolerance for
numbers, and start a kernel for each notebook. `notebooks.py` has both outputs in hand when a notebook ends.
"""
import re
from decimal import Decimal

RELATIVE = 0.02  # of two numbers; another processor's sums have other last digits, and training enlarges them
ROUNDING = 1e-5  # two errors below this are both float32 rounding
NUMBER = re.compile(r"(?<![\w.])[-+]?\d[\d,_]*(?:\.\d+)?(?:e[-+]\d\d?)?(?![0-9a-z_])", re.I)
PASSING = [  # what says nothing: addresses, lines of a source that moved, borders that grow with a number, colours
    (r"<ipython-input-[^>]*>| at 0x[0-9a-f]{6,}|#L\d+|\x1b\[[0-9;]*m", ""),
    (r"'\w+_(?:runtime|per_second)': '?[\d.e-]+'?", ""),  # seconds in a Trainer's log
    (r"10\^-(\d+)", r"1e-\1"),
    (r"[-=─]{4,}|[│|\\]", " ")]


def text_of(output):
    "What an output says: of a picture its size, of warnings nothing, which differ from release to release."
    if output.get("output_type") == "stream":
        return "" if output.get("name") == "stderr" else "".join(output["text"])
    data = output.get("data", {})
    text = "".join(data.get("text/markdown", data.get("text/plain", "")))
    if text.startswith("<") and "text/html" in data:  # the name of an object: what a browser shows
        text = re.sub(r"(?s)<style.*?</style>|<[^>]*>", " ", "".join(data["text/html"]))
    return text


def tokens(outputs):
    "(words and signs, numbers as they are written) of all outputs of a cell."
    text = "\n".join(map(text_of, outputs))
    for pattern, instead in PASSING:
        text = re.sub(pattern, instead, text)
    return NUMBER.sub(" # ", text).split(), NUMBER.findall(text)


def same_number(one, other):
    a, b = (Decimal(number.replace(",", "").replace("_", "")) for number in (one, other))
    if abs(a - b) <= RELATIVE * float(max(abs(a), abs(b))) or max(abs(a), abs(b)) <= ROUNDING:
        return True
    # one in the last place that both show, but of whole numbers, which are not rounded
    places = min(a.as_tuple().exponent, b.as_tuple().exponent)
    return places < 0 and float(abs(a - b)) <= 1.001 * 10.0 ** places


def difference(stored, new):
    "None, or in words what another reader of the two outputs would see first."
    (words, numbers), (new_words, new_numbers) = tokens(stored), tokens(new)
    if words != new_words:
        pairs = enumerate(zip(words, new_words))
        first = next((i for i, (a, b) in pairs if a != b), min(len(words), len(new_words)))
        was, now = (" ".join(each[max(first - 5, 0):first + 5]) for each in (words, new_words))
        return f"says {now!r}, stored is {was!r}"
    apart = [f"{b}, stored is {a}" for a, b in zip(numbers, new_numbers) if not same_number(a, b)]
    return f"{len(apart)} of {len(numbers)} numbers differ: " + "; ".join(apart[:6]) if apart else None
