"""Lines of WikiText-103 for guides and benchmarks.

They come from the Hugging Face hub, or, on a machine without a network, from a folder
that the environment variable `PROMPT_PACKING_DATA` names: its subfolder `wikitext` has
the three files named below."""
import os
from pathlib import Path

_wikitext_files = {"train": "wt103_train_head.txt", "validation": "wt103_valid.txt",
                   "test": "wt103_test.txt"}

def wikitext_lines(
    split:str="validation", # "train", "validation" or "test"
) -> list: # of str, one paragraph or heading each
    """Lines of WikiText-103 with more than two characters.

    Raises `KeyError` for another split, and what `datasets.load_dataset` raises where
    there is neither the folder nor a network."""
    name, folder = _wikitext_files[split], os.environ.get("PROMPT_PACKING_DATA")
    if folder:
        lines = Path(folder, "wikitext", name).read_text("utf-8").split("\n")
    else:
        from datasets import load_dataset
        data = load_dataset("Salesforce/wikitext", "wikitext-103-v1", split=split)
        lines = data["text"]
    return [line.strip() for line in lines if len(line.strip()) > 2]
