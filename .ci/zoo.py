"""Every loss of reliability/batches_cases.py, trained with accumulation (or, by `--setting`, under
a budget) beside one batch of transformers; for a maintainer who has changed the core.

    python .ci/zoo.py                     # one and a half minutes
    python .ci/zoo.py --setting budget_26 "class weights" "nt xent"

Prints what is not exact, with the strategy and the codes of the messages, and the counts.
Exit status 1 where a case is silently wrong or crashes.
"""
import argparse
import collections
import os
import sys
import time
from pathlib import Path

root = Path(__file__).resolve().parent.parent
pages = root / "nbs" / "reliability"


def facts_of_runs(kind):
    "The facts of the last training: what a Trainer of this kind leaves behind."
    last = []
    usual = kind._inner_training_loop

    def loop(self, *args, **kwargs):
        result = usual(self, *args, **kwargs)
        last[:] = [self.loss_facts]
        return result
    kind._inner_training_loop = loop
    return last


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help="default: all losses")
    parser.add_argument("--setting", default="accumulated", help="of measure_batches.SETTINGS")
    args = parser.parse_args()
    sys.path[:0] = [str(root), str(pages)]
    os.chdir(pages)
    import measure_batches
    from prompt_packing.accumulation_loss.exact_loss import ExactLossMixin
    measure_batches.setup()
    last, begin = facts_of_runs(ExactLossMixin), time.time()
    settings = measure_batches.SETTINGS["loss"]
    table = {name: settings[name] for name in ("stock", args.setting)}
    cases = [name for name, case in measure_batches.CASES.items() if case.kind == "loss"]
    outcomes = collections.Counter()
    for name in args.cases or cases:
        for line in measure_batches.measure([name], lambda _: None, table):
            outcomes[line["outcome"]] += 1
            if line["outcome"] not in ("exact", "random"):
                facts = last[0] if last else None
                codes = [message.code for message in facts.messages] if facts else []
                print(f"{line['outcome']:7} {name:32} {facts and facts.strategy}", *codes)
    print(", ".join(f"{number} {outcome}" for outcome, number in outcomes.items()),
          f"({time.time() - begin:.0f} s)")
    sys.exit(bool(outcomes["silent"] or outcomes["crash"]))


if __name__ == "__main__":
    main()
