"""Runs a training script in the current folder, and records what its Trainers did.

    python driver.py RECORD SCRIPT ARGUMENTS...        # torch.load reads RECORD"""
import atexit
import os
import runpy
import sys
import warnings

import torch
import transformers

warnings.filterwarnings("ignore")
record, script, *arguments = sys.argv[1:]
trainers, initial = [], []
usual_init = transformers.Trainer.__init__


def init(self, *args, **kwargs):
    usual_init(self, *args, **kwargs)
    trainers.append(self)
    initial.append(weights_of(self))


def weights_of(trainer):
    state = trainer.accelerator.unwrap_model(trainer.model).state_dict()
    return {name: values.detach().double().clone() for name, values in state.items()}


def state_of(trainer, initial):
    state = trainer.state
    facts = getattr(trainer, "loss_facts", None)
    return dict(
        steps=state.global_step, max_steps=state.max_steps, epoch=state.epoch,
        best=state.best_metric, best_step=state.best_global_step,
        flos=float(state.total_flos), tokens=state.num_input_tokens_seen,
        log=state.log_history,
        messages=[str(message.code) for message in facts.messages] if facts else [],
        weights=weights_of(trainer), initial=initial)


def write():
    if os.environ.get("RANK", "0") == "0":
        torch.save([*map(state_of, trainers, initial)], record)


init.__wrapped__ = usual_init # sentence-transformers and TRL read its signature
transformers.Trainer.__init__ = init
atexit.register(write)
transformers.set_seed(1) # heads that a script makes before it sets a seed
sys.argv = [script, *arguments]
sys.path.insert(0, ".")
runpy.run_path(script, run_name="__main__")
