"""Does a step of your Trainer depend on how it is split?

Copy this file, write `make_trainer` and `ROWS`, and run pytest on it. The same rows
should give the same gradient and the same logged loss in any number of micro-batches,
on any number of processes, padded on either side."""
import math
import os
import tempfile
from dataclasses import dataclass

import torch
from accelerate.state import AcceleratorState
from torch.distributed.elastic.utils.distributed import get_free_port
from torch.nn.utils.rnn import pad_sequence
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from prompt_packing.accumulation_loss.audit import compare_gradients

@dataclass(frozen=True)
class Setting:
    "How your Trainer is to take `steps` optimizer steps, each with all of these rows."
    rows: list # over all processes
    accumulation: int = 1 # micro-batches of a process in a step
    processes: int = 1 # over which rows are distributed; your Trainer is made in each
    padding_side: str = "right" # or "left"
    sampler: str | None = None # as your Trainer calls it; None: its default
    steps = 2 # with a learning rate of 0 both have the same gradient

    @property
    def batch_size(self) -> int: # rows of a micro-batch; the last may have fewer
        return math.ceil(len(self.rows) / (self.accumulation * self.processes))

ROWS = [dict(input_ids=list(range(3 + i, 7 + i + 5 * i % 9))) for i in range(8)]

def make_trainer(setting: Setting): # write your own: it has `train()` and `model`
    "The same weights each time, no dropout, no clipping, a learning rate of 0."
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2))
    def collate(rows):
        ids = [torch.tensor(row["input_ids"]) for row in rows]
        labels = pad_sequence(ids, True, -100, setting.padding_side)
        mask = (labels != -100).long()
        return dict(input_ids=labels * mask, attention_mask=mask, labels=labels)
    return Trainer(model, TrainingArguments(
        tempfile.gettempdir(), per_device_train_batch_size=setting.batch_size,
        gradient_accumulation_steps=setting.accumulation, max_steps=setting.steps,
        logging_steps=1, learning_rate=0.0, max_grad_norm=0.0, save_strategy="no",
        report_to="none", use_cpu=True), collate, setting.rows)

def settings(rows):
    "Settings that should all give the gradient of one batch, by name."
    by_count = {f"accumulation={n}": Setting(rows, n) for n in (2, 8)}
    return by_count | {
        "unequal": Setting(rows[:-1], 2), "processes=2": Setting(rows, 1, 2),
        "both=2": Setting(rows, 2, 2), "padding=left": Setting(rows, padding_side="left")}

def run(make_trainer, setting: Setting) -> dict: # gradient of a step, logged losses
    if setting.processes == 1:
        return run_here(make_trainer, setting)
    with tempfile.NamedTemporaryFile() as file: # forked: nothing need be importable
        torch.multiprocessing.start_processes(
            run_in_group, (make_trainer, setting, get_free_port(), file.name),
            setting.processes, start_method="fork")
        return torch.load(file.name, weights_only=True)

class StepReader:
    """Copies the gradient of a model at every optimizer step, whatever loop takes it.

    After the step: Lightning computes the gradient in a closure within the step, and no
    optimizer of torch changes `.grad`."""
    def __init__(self, model: torch.nn.Module): # the model that is trained, not wrapped
        # ids and not names: a wrapper renames parameters, and keeps the objects
        self.names = {id(p): name for name, p in model.named_parameters()}
        self.gradients = [] # by step, then by name

    def __call__(self, optimizer, args, kwargs): # by torch, after each optimizer's step
        gradient = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = self.names.get(id(parameter))
                if name is not None and parameter.grad is not None:
                    gradient[name] = parameter.grad.detach().cpu().clone()
        if gradient:
            self.gradients.append(gradient)

def run_here(make_trainer, setting: Setting) -> dict:
    trainer = make_trainer(setting)
    reader = StepReader(trainer.model)
    with register_optimizer_step_post_hook(reader):
        trainer.train()
    first, second = reader.gradients # one for each step
    if setting.accumulation * setting.processes == 1: # split, the order may matter
        assert compare_gradients(first, second)["error"] < 1e-3, "switch dropout off"
    logs = getattr(getattr(trainer, "state", None), "log_history", [])
    return dict(gradient=first, losses=[log["loss"] for log in logs if "loss" in log])

def run_in_group(rank, make_trainer, setting: Setting, port, file):
    os.environ |= dict(RANK=str(rank), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1",
                       MASTER_PORT=str(port), WORLD_SIZE=str(setting.processes),
                       ACCELERATE_USE_CPU="true")
    torch.set_num_threads(1) # a forked process waits forever for its parent's threads
    # accelerate knows from the parent that there is one process
    AcceleratorState._reset_state(reset_partial_state=True)
    ran = run_here(make_trainer, setting)
    if rank == 0:
        torch.save(ran, file)
    torch.distributed.destroy_process_group()

def compared(make_trainer, setting: Setting) -> dict: # ratio, cosine, error, loss_ratio
    right, ran = run(make_trainer, Setting(setting.rows)), run(make_trainer, setting)
    losses = ran["losses"][:1] + right["losses"][:1] # none where nothing is logged
    return compare_gradients(right["gradient"], ran["gradient"]) | dict(
        loss_ratio=losses[0] / losses[1] if losses else 1.0)

def test_nothing_is_clipped(): # which would give every gradient one length
    fewer = Setting(ROWS[:-1])
    gradients = [run(make_trainer, each)["gradient"] for each in (Setting(ROWS), fewer)]
    assert abs(compare_gradients(*gradients)["ratio"] - 1) > 1e-4, "max_grad_norm=0"

def pytest_generate_tests(metafunc):
    if "setting" in metafunc.fixturenames:
        metafunc.parametrize("setting", settings(ROWS))

def test_step_does_not_depend_on(setting):
    found = compared(make_trainer, settings(ROWS)[setting])
    assert found["error"] < 1e-3, f"the gradient: {found}"
    assert abs(found["loss_ratio"] - 1) < 1e-3, f"the logged loss: {found}"
