"""Cases for `side_by_side.ipynb`: losses, collators, evaluations and predictions that users write.

A case is a few lines. What it computes with is above it: rows of different lengths, the
collator that pads them, a small model. `s` holds what a loss may use besides outputs
and batch: `s.step`, `s.model`, `s.memory` (a dict of its own), `s.count`."""

import random
from collections import UserDict
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_sequence
from transformers import BatchEncoding

ce, pad_rows = F.cross_entropy, nn.utils.rnn.pad_sequence
WIDTH = 12  # numbers in `x`, and tokens of the longest row: equal sizes get confused


# rows


def make_rows(number: int, seed: int = 1) -> list[dict]:
    "Rows of 3 to 12 tokens; some have no token label."
    g = torch.Generator().manual_seed(seed)

    def draw(high, *size):
        return torch.randint(high, size, generator=g)

    rows = []
    for i in range(number):
        size = 3 + int(draw(10, 1))
        labels = draw(3, size).masked_fill(draw(3, size) == 0, -100)
        if i % 7 == 3:
            labels[:] = -100
        rows.append(
            dict(
                input_ids=(draw(27, size) + 3).tolist(),
                token_labels=labels.tolist(),
                x=torch.randn(WIDTH, generator=g),
                x2=torch.randn(WIDTH, generator=g),
                labels=int(draw(3, 1)),
                score=float(torch.randn(1, generator=g)),
                group=int(draw(4, 1)),
                text="word " * size,
            )
        )
    return rows


def padded(lists, value=0):
    return pad_rows([torch.tensor(v) for v in lists], True, value)


def collate(rows) -> dict:
    "What most people write: ids and labels are padded, numbers stacked."
    ids = [r["input_ids"] for r in rows]
    batch = dict(
        input_ids=padded(ids),
        attention_mask=padded([[1] * len(i) for i in ids]),
        token_labels=padded([r["token_labels"] for r in rows], -100),
    )
    batch |= {k: torch.stack([r[k] for r in rows]) for k in ("x", "x2")}
    return batch | {
        k: torch.tensor([r[k] for r in rows]) for k in ("labels", "score", "group")
    }


# models


class Net(nn.Module):
    "Tokens are averaged, numbers added; five outputs for losses to choose from."

    def __init__(self):
        super().__init__()
        self.e, self.a, self.p = (
            nn.Embedding(30, 16),
            nn.Linear(WIDTH, 16),
            nn.Linear(16, 16),
        )
        self.o, self.v, self.t = (
            nn.Linear(16, 3),
            nn.Linear(16, 1),
            nn.Parameter(torch.ones(2)),
        )

    def forward(self, input_ids, attention_mask, x, x2, **rest):
        k, e = attention_mask[..., None].float(), self.e(input_ids)
        h = torch.tanh((e * k).sum(1) / k.sum(1) + self.a(x))
        return dict(
            logits=self.o(h),
            h=h,
            z=self.p(self.a(x2).tanh()),
            tokens=self.o(e.tanh()),
            value=self.v(h)[:, 0],
        )


class Student(Net):
    "With a teacher that does not train."

    def __init__(self):
        super().__init__()
        self.teacher = nn.Linear(WIDTH, 16).requires_grad_(False)
        self.register_buffer("queue", torch.randn(8, 16))
        self.register_buffer("centers", torch.zeros(3, 16))


@dataclass
class Case:
    kind: str
    name: str
    function: object
    how: str = "compute_loss"  # or "forward", "loss_func": where the loss is computed
    model: type = Net
    collate: object = collate  # or a function without arguments that makes one
    random: bool = False  # draws random numbers, so only messages can be judged
    sixteen_bits: bool = False  # rounded to bfloat16, also as one batch
    args: dict = field(default_factory=dict)  # of `TrainingArguments`
    given: dict = field(default_factory=dict)  # to the Trainer


CASES: dict[str, Case] = {}


def case(kind, **options):
    def keep(function):
        name = function.__name__.replace("_", " ")
        assert name not in CASES, name
        CASES[name] = Case(kind, name, function, **options)
        return function

    return keep


def loss(how="compute_loss", **options):
    return case("loss", how=how, **options)


def means(b):
    return b["token_labels"].flatten()


def token_losses(o, b):
    return ce(o["tokens"].flatten(0, 1), means(b), reduction="none")


def rows_of(o):
    return torch.arange(len(o["h"]))


def unit(v):
    return F.normalize(v, dim=-1)


def row_losses(o, b):
    return ce(o["logits"], b["labels"], reduction="none")


def plain(o, b, s=None):
    return ce(o["logits"], b["labels"])


# losses: contrastive


@loss()
def symmetric_infonce(o, b, s):
    z = unit(o["h"]) @ unit(o["z"]).T / 0.1
    return (ce(z, rows_of(o)) + ce(z.T, rows_of(o))) / 2


@loss("forward")
def infonce_learned_temperature(o, b, s):
    return ce(unit(o["h"]) @ unit(o["z"]).T * s.model.t[0].exp(), rows_of(o))


@loss()
def supervised_contrastive(o, b, s):
    h = unit(o["h"])
    eye = torch.eye(len(h)).bool()
    logp = (h @ h.T / 0.5).masked_fill(eye, -1e9).log_softmax(1)
    same = (b["group"][:, None] == b["group"]) & ~eye
    return -(logp * same).sum() / same.sum().clamp(min=1)


@loss("forward")
def nt_xent(o, b, s):
    v = unit(torch.cat([o["h"], o["z"]]))
    n = len(v) // 2
    z = (v @ v.T / 0.5).masked_fill(torch.eye(2 * n).bool(), -1e9)
    return ce(z, torch.arange(2 * n).roll(n))


@loss()
def batch_hard_triplets(o, b, s):
    d = torch.cdist(o["h"], o["h"])
    same = b["group"][:, None] == b["group"]
    far, near = (d * same).amax(1), (d + 1e3 * same).amin(1)
    return F.relu(far - near + 1).mean()


@loss()
def vicreg(o, b, s):
    h = o["h"] - o["h"].mean(0)
    n = max(len(h) - 1, 1)
    c = h.T @ h / n
    return (
        F.relu(1 - (c.diagonal() + 1e-4).sqrt()).mean()
        + (c - c.diag().diag()).pow(2).sum() / 16
    )


@loss("forward")
def barlow_twins(o, b, s):
    h, z = ((v - v.mean(0)) / (v.std(0, correction=0) + 1e-2) for v in (o["h"], o["z"]))
    c = h.T @ z / len(h)
    return (c.diagonal() - 1).pow(2).sum() + 0.01 * c.pow(2).sum()


@loss()
def alignment_and_uniformity(o, b, s):
    h, z = unit(o["h"]), unit(o["z"])
    return (h - z).pow(2).sum(1).mean() + (-2 * torch.cdist(h, h).pow(2)).exp().mean().log()


@loss("forward")
def siglip(o, b, s):
    z = unit(o["h"]) @ unit(o["z"]).T * 5 - 2
    return -F.logsigmoid(z * (2 * torch.eye(len(z)) - 1)).sum() / len(z)


@loss()
def rare_pairs_attract(o, b, s):
    n = (b["score"] * 20).round()
    same = (n[:, None] == n).triu(1)
    pull = torch.cdist(o["h"], o["h"] + 1e-3)[same]
    return plain(o, b) + (pull.mean() if len(pull) else 0)


# losses: ranking


@loss()
def listnet(o, b, s):
    return -(b["score"].softmax(0) * o["value"].log_softmax(0)).sum()


@loss("forward")
def neighbours_margin(o, b, s):
    first, second = o["value"][:-1], o["value"][1:]
    return F.relu(0.5 - (first - second) * (b["score"][:-1] - b["score"][1:]).sign()).mean()


@loss()
def ranknet_all_pairs(o, b, s):
    better = b["score"][:, None] > b["score"]
    return F.softplus(o["value"] - o["value"][:, None])[better].mean()


@loss("forward")
def bradley_terry_halves(o, b, s):
    n = len(o["value"]) // 2
    return -F.logsigmoid(o["value"][:n] - o["value"][n : 2 * n]).mean()


@loss()
def approximate_ndcg(o, b, s):
    rank = 1 + torch.sigmoid(o["value"] - o["value"][:, None]).sum(0)
    return -(b["score"].exp() / (1 + rank).log2()).sum() / b["score"].exp().sum()


@loss()
def hardest_negative(o, b, s):
    z = o["h"] @ o["z"].T
    own = z.diagonal()
    return F.relu(1 - own + z.masked_fill(torch.eye(len(z)).bool(), -1e9).amax(1)).mean()


# losses: reinforcement


def log_prob(o, b):
    return -row_losses(o, b)


@loss()
def reinforce_batch_baseline(o, b, s):
    return -(log_prob(o, b) * (b["score"] - b["score"].mean())).mean()


@loss("forward")
def ppo_normalised_advantages(o, b, s):
    a = (b["score"] - b["score"].mean()) / (b["score"].std(correction=0) + 1e-3)
    r = (log_prob(o, b) + 1.1).exp()
    return -torch.min(r * a, r.clamp(0.8, 1.2) * a).mean()


@loss()
def grpo_by_group(o, b, s):
    one = F.one_hot(b["group"], 4).float()
    n = one.sum(0).clamp(min=1)
    mean = (one.T @ b["score"]) / n
    return -(log_prob(o, b) * (b["score"] - mean[b["group"]])).mean()


@loss("forward")
def actor_critic(o, b, s):
    a = b["score"] - o["value"]
    entropy = -(o["logits"].softmax(1) * o["logits"].log_softmax(1)).sum(1)
    return (
        -(log_prob(o, b) * a.detach()).mean()
        + 0.5 * a.pow(2).mean()
        - 0.01 * entropy.mean()
    )


@loss()
def dpo_with_reference(o, b, s):
    reference = b["x"].sum(1) / 10
    return -F.logsigmoid(0.5 * (log_prob(o, b) - reference)).mean()


@loss("loss_func")
def advantage_weighted_by_softmax(o, b, s):
    return (row_losses(o, b) * o["value"].detach().softmax(0)).sum()


# losses: distillation and teachers


@loss(model=Student)
def kl_batchmean(o, b, s):
    t = s.model.teacher(b["x2"])[:, :3].softmax(1)
    return F.kl_div(o["logits"].log_softmax(1), t, reduction="batchmean")


@loss()
def kl_over_real_tokens(o, b, s):
    m = b["attention_mask"].bool()
    return (
        F.kl_div(o["tokens"][m].log_softmax(-1), torch.full((3,), 1 / 3), reduction="sum")
        / m.sum()
    )


@loss("forward", model=Student)
def relational_distances(o, b, s):
    d, t = (
        torch.cdist(o["h"], o["h"] + 1e-3),
        torch.cdist(s.model.teacher(b["x"]), s.model.teacher(b["x"])),
    )
    return F.smooth_l1_loss(d / d.mean(), t / (t.mean() + 1e-3))


@loss("forward", model=Student)
def features_and_classes(o, b, s):
    return plain(o, b) + F.mse_loss(o["h"], s.model.teacher(b["x2"]))


def byol(o, b, s):
    return -F.cosine_similarity(o["z"], s.model.teacher(b["x"])).mean()


@loss(model=Student)
def teacher_by_data(o, b, s):
    for p, q in zip(s.model.teacher.parameters(), s.model.a.parameters()):
        p.data.mul_(0.9).add_(q.data, alpha=0.1)
    return byol(o, b, s)


@loss(model=Student)
def teacher_by_copy(o, b, s):
    with torch.no_grad():
        for p, q in zip(s.model.teacher.parameters(), s.model.a.parameters()):
            p.copy_(0.9 * p + 0.1 * q)
    return byol(o, b, s)


@loss("forward", model=Student)
def teacher_by_new_data(o, b, s):
    for p, q in zip(s.model.teacher.parameters(), s.model.a.parameters()):
        p.data = 0.9 * p.data + 0.1 * q.data
    return byol(o, b, s)


@loss("forward", model=Student)
def teacher_by_foreach(o, b, s):
    with torch.no_grad():
        torch._foreach_lerp_(
            list(s.model.teacher.parameters()), list(s.model.a.parameters()), 0.1
        )
    return byol(o, b, s)


@loss(model=Student)
def teacher_moves_after_the_loss(o, b, s):
    made = byol(o, b, s)
    s.model.teacher.load_state_dict(s.model.a.state_dict())
    return made


# losses: several terms, mixtures of sums and means


@loss("forward")
def token_mean_and_row_mean(o, b, s):
    return ce(o["tokens"].flatten(0, 1), means(b)) + plain(o, b)


@loss("forward")
def learned_uncertainties(o, b, s):
    first, second, t = plain(o, b), F.mse_loss(o["value"], b["score"]), s.model.t
    return first * (-t[0]).exp() + second * (-t[1]).exp() + t.sum()


@loss()
def tasks_that_are_there(o, b, s):
    each = row_losses(o, b)
    return sum(each[b["group"] == g].mean() for g in b["group"].unique())


@loss()
def mean_of_group_means(o, b, s):
    each = row_losses(o, b)
    return torch.stack([each[b["group"] == g].mean() for g in b["group"].unique()]).mean()


@loss("loss_func")
def nan_for_an_empty_part(o, b, s):
    m = b["labels"] == 1
    return ce(o["logits"][m], b["labels"][m])


@loss()
def sum_of_tokens_by_rows(o, b, s):
    return token_losses(o, b).sum() / len(b["labels"])


@loss()
def sum_plus_mean(o, b, s):
    return 0.01 * token_losses(o, b).sum() + plain(o, b)


@loss("loss_func")
def sum_by_count_plus_mean(o, b, s):
    each = row_losses(o, b)
    return each.sum() / (s.count or len(each)) + 0.1 * o["logits"].pow(2).mean()


@loss("loss_func")
def sum_by_count(o, b, s):
    each = row_losses(o, b)
    return each.sum() / (s.count or len(each))


@loss()
def plain_sum(o, b, s):
    return ce(o["logits"], b["labels"], reduction="sum")


@loss("forward")
def mean_tokens_then_rows(o, b, s):
    each = token_losses(o, b).view(b["token_labels"].shape)
    n = (b["token_labels"] != -100).sum(1)
    return (each.sum(1)[n > 0] / n[n > 0]).mean()


# losses: clamps, weights


@loss()
def rare_class_clamped(o, b, s):
    m = (b["labels"] == 2) & (b["group"] == 0)
    return (row_losses(o, b) * m).sum() / m.sum().clamp(min=1)


@loss("forward")
def at_least_forty_targets(o, b, s):
    return token_losses(o, b).sum() / (means(b) != -100).sum().clamp(min=40)


@loss()
def at_most_ten_targets(o, b, s):
    return token_losses(o, b).sum() / (means(b) != -100).sum().clamp(max=10)


@loss("forward")
def flooding(o, b, s):
    return (plain(o, b) - 1.08).abs() + 1.08


@loss()
def free_bits(o, b, s):
    return plain(o, b) + o["h"].pow(2).mean(0).clamp(min=0.2).sum()


@loss("loss_func")
def eight_hardest_rows(o, b, s):
    each = row_losses(o, b)
    return each.topk(min(8, len(each)))[0].mean()


@loss("forward")
def class_weights(o, b, s):
    return ce(o["logits"], b["labels"], torch.tensor([1.0, 5.0, 0.2]))


@loss()
def focal_by_positives(o, b, s):
    each = row_losses(o, b)
    positive = (b["labels"] > 0).sum()
    return ((1 - (-each).exp()) ** 2 * each).sum() / positive.clamp(min=1)


@loss("loss_func")
def classes_balanced_in_batch(o, b, s):
    n = torch.bincount(b["labels"], minlength=3).float()
    return ce(o["logits"], b["labels"], len(b["labels"]) / n.clamp(min=1))


@loss("forward")
def weights_that_sum_to_one(o, b, s):
    w = b["score"].exp()
    return (row_losses(o, b) * w).sum() / w.sum()


@loss("loss_func")
def median_of_rows(o, b, s):
    return row_losses(o, b).quantile(0.5)


@loss()
def root_of_mean_square(o, b, s):
    return F.mse_loss(o["value"], b["score"]).sqrt()


# losses: sequences, experts


@loss("forward")
def crf_like(o, b, s):
    a, m = o["tokens"][:, 0], b["attention_mask"]
    for t in range(1, m.shape[1]):
        new = (a[:, :, None] + s.model.t.mean()).logsumexp(1) + o["tokens"][:, t]
        a = torch.where(m[:, t, None] > 0, new, a)
    gold = -token_losses(o, b).view(m.shape).sum(1)
    return (a.logsumexp(1) - gold).mean()


@loss()
def ctc(o, b, s):
    n = b["attention_mask"].sum(1)
    return F.ctc_loss(
        o["tokens"].log_softmax(-1).transpose(0, 1),
        b["labels"][:, None].clamp(min=1),
        n,
        torch.ones_like(n),
    )


@loss()
def experts_balanced(o, b, s):
    gate = o["logits"].softmax(1)
    used = F.one_hot(gate.argmax(1), 3).float().mean(0)
    return F.mse_loss(o["value"], b["score"]) + 0.3 * (gate.mean(0) * used).sum()


@loss("forward")
def experts_importance_and_z(o, b, s):
    used = o["logits"].softmax(1).sum(0)
    return (
        plain(o, b)
        + 0.1 * used.var() / used.mean() ** 2
        + 0.01 * o["logits"].logsumexp(1).pow(2).mean()
    )


# losses: terms that come and go


def infonce(o, b):
    return ce(o["h"] @ o["z"].T, rows_of(o))


@loss()
def infonce_in_place_of_classes(o, b, s):
    return plain(o, b) if s.step < 4 else infonce(o, b)


@loss()
def every_third_step(o, b, s):
    return plain(o, b) + (infonce(o, b) if s.step % 3 == 2 else 0)


@loss()
def weight_grows_from_zero(o, b, s):
    return plain(o, b) + max(0, s.step - 3) * 0.1 * infonce(o, b)


@loss()
def contrastive_then_classes(o, b, s):
    return infonce(o, b) if s.step < 3 else plain(o, b)


@loss()
def mean_becomes_sum(o, b, s):
    return plain(o, b) if s.step < 5 else row_losses(o, b).sum()


@loss(random=True)
def term_at_random(o, b, s):
    return plain(o, b) + (infonce(o, b) if torch.rand(()) < 0.3 else 0)


@loss(random=True)
def term_by_random_module(o, b, s):
    return plain(o, b) + (infonce(o, b) if random.random() < 0.2 else 0)


@loss(random=True)
def noise_on_hidden(o, b, s):
    return ce(s.model.o(o["h"] + 0.1 * torch.randn_like(o["h"])), b["labels"])


# losses: memory, statistics, hooks, kinds of numbers


@loss("forward", model=Student)
def queue_in_a_buffer(o, b, s):
    z, q = unit(o["z"]), s.model.queue.clone()
    s.model.queue.copy_(torch.cat([z.detach(), q])[:8])
    own = (unit(o["h"]) * z).sum(1, keepdim=True)
    return ce(torch.cat([own, unit(o["h"]) @ q.T], 1), torch.zeros(len(z)).long())


@loss()
def memory_bank_in_a_list(o, b, s):
    bank = s.memory.setdefault("bank", [])
    bank.append(o["z"].detach())
    z = torch.cat(bank[-2:])
    return ce(o["h"] @ z.T, torch.arange(len(z))[-len(o["h"]) :])


@loss()
def divided_by_running_mean(o, b, s):
    made = plain(o, b)
    s.memory["mean"] = 0.9 * s.memory.get("mean", 1.0) + 0.1 * float(made)
    return made / s.memory["mean"]


@loss("forward", model=Student)
def centers_in_a_buffer(o, b, s):
    pull = (o["h"] - s.model.centers[b["labels"]]).pow(2).mean()
    s.model.centers.index_add_(0, b["labels"], 0.1 * o["h"].detach())
    return plain(o, b) + pull


@loss()
def after_three_calls(o, b, s):
    s.memory["calls"] = s.memory.get("calls", 0) + 1
    return plain(o, b) + (infonce(o, b) if s.memory["calls"] > 3 else 0)


@loss("loss_func")
def logits_standardised_in_batch(o, b, s):
    z = o["logits"]
    return ce((z - z.mean(0)) / (z.std(0, correction=0) + 0.1), b["labels"])


@loss()
def activity_by_hook(o, b, s):
    got = []
    hook = s.model.o.register_forward_hook(lambda m, i, out: got.append(out.pow(2).mean()))
    again = s.model(**b)
    hook.remove()
    return plain(again, b) + sum(got)


@loss()
def gradient_scaled_by_hook(o, b, s):
    o["h"].register_hook(lambda g: g / (g.norm() + 1e-6))
    return ce(s.model.o(o["h"]), b["labels"])


@loss("forward", sixteen_bits=True)
def own_autocast(o, b, s):
    with torch.autocast("cpu", torch.bfloat16):
        return ce(s.model.o(o["h"]).float(), b["labels"])


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return -0.3 * g


@loss("forward")
def gradient_reversal(o, b, s):
    return plain(o, b) + ce(s.model.o(Reversed.apply(o["h"])), (b["group"] > 1).long())


class FrozenNet(Net):
    def __init__(self):
        super().__init__()
        self.requires_grad_(False)
        self.o.requires_grad_(True)


@loss("forward", model=FrozenNet)
def frozen_backbone(o, b, s):
    return plain(o, b)


@loss()
def gradient_penalty(o, b, s):
    (g,) = torch.autograd.grad(o["value"].sum(), o["h"], create_graph=True)
    return plain(o, b) + (o["h"] * g).sum(1).pow(2).mean()


# collators: each case is one; its decorator names the loss


def collator(loss=plain, **options):
    def keep(function):
        case("collator", collate=function, **options)(function)
        CASES[function.__name__.replace("_", " ")].function = loss
        return function

    return keep


def collator_class(loss=plain, **options):
    "A collator with a state: each training makes one."

    def keep(cls):
        made = case("collator", collate=cls, **options)(cls)
        CASES[cls.__name__.replace("_", " ")].function = loss
        return made

    return keep


def score_loss(o, b, s):
    return F.mse_loss(o["value"], b["score"])


@collator(lambda o, b, s: ce(o["h"] @ o["z"].T, b["targets"]))
def labels_are_arange(rows):
    return collate(rows) | dict(targets=torch.arange(len(rows)))


class Inverted(Net):
    def forward(self, padding, **b):
        return super().forward(attention_mask=(~padding).long(), **b)


@collator(model=Inverted)
def mask_true_at_padding(rows):
    b = collate(rows)
    return b | dict(padding=b.pop("attention_mask") == 0)


class Additive(Net):
    def forward(self, bias, **b):
        return super().forward(attention_mask=(bias[:, 0, 0] == 0).long(), **b)


@collator(model=Additive)
def additive_mask_of_four_dimensions(rows):
    b = collate(rows)
    return b | dict(bias=(1 - b.pop("attention_mask"))[:, None, None].float() * -1e9)


@collator(random=True)
def random_masking(rows):
    b = collate(rows)
    return b | dict(
        input_ids=b["input_ids"].masked_fill(torch.rand(b["input_ids"].shape) < 0.3, 1)
    )


def mixed_loss(o, b, s):
    return -(o["logits"].log_softmax(1) * b["soft"]).sum(1).mean()


@collator(mixed_loss, random=True)
def mixup_with_random_rows(rows):
    b, p = collate(rows), torch.randperm(len(rows))
    one = F.one_hot(b["labels"], 3).float()
    return b | dict(x=0.7 * b["x"] + 0.3 * b["x"][p], soft=0.7 * one + 0.3 * one[p])


@collator(mixed_loss)
def mixup_with_the_next_row(rows):
    b = collate(rows)
    one = F.one_hot(b["labels"], 3).float()
    return b | dict(
        x=0.7 * b["x"] + 0.3 * b["x"].roll(1, 0), soft=0.7 * one + 0.3 * one.roll(1, 0)
    )


def twice(rows, order):
    "Each row twice, the second time with its other numbers."
    return collate(
        [rows[i] if j == 0 else rows[i] | dict(x=rows[i]["x2"]) for i, j in order]
    )


@collator(bradley_terry_halves)
def pairs_in_halves(rows):
    return twice(rows, [(i, j) for j in (0, 1) for i in range(len(rows))])


@collator(lambda o, b, s: -F.logsigmoid(o["value"][::2] - o["value"][1::2]).mean())
def pairs_as_neighbours(rows):
    return twice(rows, [(i, j) for i in range(len(rows)) for j in (0, 1)])


def thirds(o, b, s):
    a, p, n = o["h"].chunk(3)
    return F.triplet_margin_loss(a, p, n)


@collator(thirds)
def triplets_in_thirds(rows):
    k = range(len(rows))
    return twice(
        rows,
        [(i, 0) for i in k] + [(i, 1) for i in k] + [((i + 1) % len(rows), 0) for i in k],
    )


class Nested(Net):
    def forward(self, text, numbers, **rest):
        return super().forward(**text, **numbers)


@collator(lambda o, b, s: ce(o["logits"], b["targets"]["class"]), model=Nested)
def nested_dicts(rows):
    b = collate(rows)
    return dict(
        text={k: b[k] for k in ("input_ids", "attention_mask")},
        numbers={k: b[k] for k in ("x", "x2")},
        targets={"class": b["labels"]},
    )


class Ragged(Net):
    def forward(self, ids, **b):
        return super().forward(
            pad_rows(ids, True), pad_rows([torch.ones_like(i) for i in ids], True), **b
        )


@collator(model=Ragged)
def ids_in_a_list(rows):
    b = {k: v for k, v in collate(rows).items() if k not in ("input_ids", "attention_mask")}
    return b | dict(ids=[torch.tensor(r["input_ids"]) for r in rows])


@collator()
def names_and_numbers_of_rows(rows):
    return collate(rows) | dict(
        names=[r["text"] for r in rows], origin="file", version=3, none=None
    )


@collator(
    lambda o, b, s: (row_losses(o, b) * torch.tensor([len(t) for t in b["texts"]])).mean()
)
def strings_weigh_rows(rows):
    return collate(rows) | dict(texts=[r["text"] for r in rows])


@collator(
    lambda o, b, s: ce(o["logits"], b.labels) + b.data["score"].mean() * o["value"].mean()
)
def batch_encoding(rows):
    return BatchEncoding(collate(rows))


@collator()
def padded_on_the_left(rows):
    b = collate(rows)
    n = b["input_ids"].shape[1]
    left = lambda v: F.pad(torch.tensor(v), (n - len(v), 0))
    return b | dict(
        input_ids=torch.stack([left(r["input_ids"]) for r in rows]),
        attention_mask=torch.stack([left([1] * len(r["input_ids"])) for r in rows]),
    )


class Edges(Net):
    def forward(self, edges, **b):
        o = super().forward(**b)
        return o | dict(h=o["h"], logits=o["logits"] + edges.sum(1, keepdim=True))


@collator(model=Edges)
def columns_of_one_less(rows):
    return collate(rows) | dict(
        edges=padded([[0.1] * (len(r["input_ids"]) - 1) for r in rows])
    )


class Images(Net):
    def forward(self, pixels, owner, **b):
        o = super().forward(**b)
        sums = torch.zeros_like(o["h"]).index_add(0, owner, self.a(pixels).tanh())
        return o | dict(logits=self.o(o["h"] + sums))


@collator(model=Images)
def images_of_all_rows_in_one_tensor(rows):
    owner = [i for i, r in enumerate(rows) for _ in range(r["group"])]
    pixels = [rows[i]["x2"] for i in owner] + [torch.zeros(0, WIDTH)]
    return collate(rows) | dict(
        pixels=torch.cat([p.view(-1, WIDTH) for p in pixels]),
        owner=torch.tensor(owner, dtype=torch.long),
    )


@collator(lambda o, b, s: token_losses(o, b).sum() / b["targets"])
def number_of_targets_in_batch(rows):
    b = collate(rows)
    return b | dict(targets=(b["token_labels"] != -100).sum().clamp(min=1))


@collator(lambda o, b, s: plain(o, b) * b["longest"] / 10)
def length_of_the_longest_row(rows):
    return collate(rows) | dict(longest=max(len(r["input_ids"]) for r in rows))


@collator()
def labels_popped_from_rows(rows):
    labels = [r.pop("labels") for r in rows]
    return collate([r | dict(labels=y) for r, y in zip(rows, labels)])


@collator()
def lists_of_rows_change(rows):
    for r in rows:
        r["input_ids"].insert(0, 2)
        r["token_labels"].insert(0, -100)
    return collate(rows)


@collator(score_loss)
def tensors_of_rows_change(rows):
    for r in rows:
        r["x"].mul_(0.5)
    return collate(rows)


class FromTuple(Net):
    def forward(self, ids, mask, x, x2, labels):
        return super().forward(ids, mask, x, x2)


@collator(lambda o, b, s: ce(o["logits"], b[-1]), model=FromTuple)
def a_tuple(rows):
    b = collate(rows)
    return tuple(b[k] for k in ("input_ids", "attention_mask", "x", "x2", "labels"))


class Fields(UserDict):
    @property
    def labels(self):
        return self["labels"]


@collator(lambda o, b, s: ce(o["logits"], b.labels))
def a_class_of_its_own(rows):
    return Fields(collate(rows))


class Flat(Net):
    def forward(self, input_ids, position_ids, **rest):
        row = (position_ids[0] == 0).cumsum(0) - 1
        e = self.e(input_ids[0])
        sums = torch.zeros(int(row[-1]) + 1, 16).index_add(0, row, e)
        return dict(logits=self.o((sums / torch.bincount(row)[:, None]).tanh()))


@collator(model=Flat)
def flattened(rows):
    ids = [torch.tensor(r["input_ids"]) for r in rows]
    return dict(
        input_ids=torch.cat(ids)[None],
        labels=torch.tensor([r["labels"] for r in rows]),
        position_ids=torch.cat([torch.arange(len(i)) for i in ids])[None],
    )


@collator(
    lambda o, b, s: F.binary_cross_entropy_with_logits(o["h"][:, :WIDTH], b["labels"])
)
def labels_as_wide_as_the_batch(rows):
    return collate(rows) | dict(labels=torch.stack([(r["x2"] > 0).float() for r in rows]))


@collator(lambda o, b, s: plain(o, b) * 1.0 + (o["h"].mean(1) * b["x"].mean(1)).mean())
def numbers_as_wide_as_the_batch(rows):
    return collate(rows)


@collator(lambda o, b, s: ce(o["tokens"].flatten(0, 1), means(b)))
def prompts_hidden_by_labels(rows):
    return collate(
        [r | dict(token_labels=[-100] * 2 + [1] * (len(r["input_ids"]) - 2)) for r in rows]
    )


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.e, self.r, self.o = nn.Embedding(30, 8), nn.GRU(8, 8), nn.Linear(8, 3)

    def forward(self, ids, **rest):
        last = self.r(ids._replace(data=self.e(ids.data)))[1][-1]
        return dict(logits=self.o(last), h=last)


@collator(model=Packed)
def packed_sequences(rows):
    return dict(
        ids=pack_sequence(
            [torch.tensor(r["input_ids"]) for r in rows], enforce_sorted=False
        ),
        labels=torch.tensor([r["labels"] for r in rows]),
    )


@collator()
def truncated_to_the_shortest_row(rows):
    n = min(len(r["input_ids"]) for r in rows)
    return collate(
        [
            r | dict(input_ids=r["input_ids"][:n], token_labels=r["token_labels"][:n])
            for r in rows
        ]
    )


@collator(
    lambda o, b, s: ce(o["tokens"].flatten(0, 1), means(b)) + o["tokens"].pow(2).mean()
)
def all_rows_at_sixteen_tokens(rows):
    b = collate(rows)
    n = 16 - b["input_ids"].shape[1]
    return b | {
        k: F.pad(b[k], (0, n), value=v)
        for k, v in (("input_ids", 0), ("attention_mask", 0), ("token_labels", -100))
    }


@collator(neighbours_margin)
def sorted_by_length(rows):
    return collate(sorted(rows, key=lambda r: len(r["input_ids"])))


@collator(score_loss)
def scores_standardised(rows):
    b = collate(rows)
    return b | dict(
        score=(b["score"] - b["score"].mean()) / (b["score"].std(correction=0) + 0.1)
    )


@collator(
    lambda o, b, s: F.relu(0.3 - o["value"] + (o["z"] * b["other"][:, :1]).mean(1)).mean()
)
def negatives_from_the_next_row(rows):
    b = collate(rows)
    return b | dict(other=b["x2"].roll(1, 0))


@collator(lambda o, b, s: ce(o["value"].view(-1, 2), b["choice"]))
def two_choices_of_each_row(rows):
    return pairs_as_neighbours(rows) | dict(
        choice=torch.tensor([r["group"] % 2 for r in rows])
    )


@collator()
def rows_left_out(rows):
    return collate([r for r in rows if r["group"] > 0] or rows[:1])


class TimeFirst(Net):
    def forward(self, input_ids, attention_mask, **b):
        return super().forward(input_ids.T, attention_mask.T, **b)


@collator(model=TimeFirst)
def time_first(rows):
    b = collate(rows)
    return b | dict(input_ids=b["input_ids"].T, attention_mask=b["attention_mask"].T)


@collator(lambda o, b, s: (row_losses(o, b) * torch.from_numpy(b["share"])).sum())
def weights_by_groups_of_the_batch(rows):
    n = np.bincount([r["group"] for r in rows], minlength=4)
    return collate(rows) | dict(
        share=np.array([1 / n[r["group"]] for r in rows], np.float32)
    )


@collator(lambda o, b, s: ce(o["h"] @ s.model.e(b["vocabulary"]).T, b["targets"]))
def vocabulary_of_the_batch(rows):
    ids = torch.tensor([r["input_ids"][-1] for r in rows])
    vocabulary, index = ids.unique(return_inverse=True)
    return collate(rows) | dict(vocabulary=vocabulary, targets=index)


@collator()
def doubles_left_out(rows):
    seen = {(r["group"], r["labels"]): r for r in rows}
    return collate(list(seen.values()))


@collator_class(random=True)
class masks_every_other_call:
    calls = 0

    def __call__(self, rows):
        self.calls += 1
        b = collate(rows)
        return b | dict(x=b["x"] * (self.calls % 2))


@collator_class(random=True)
class draws_from_its_own_generator:
    def __init__(self):
        self.numbers = np.random.default_rng(0)

    def __call__(self, rows):
        b = collate(rows)
        return b | dict(
            x=b["x"] + torch.tensor(self.numbers.normal(size=b["x"].shape)).float()
        )


@collator(random=True)
def noise_now_and_then(rows):
    b = collate(rows)
    return b | dict(x=b["x"] * (0 if random.random() < 0.15 else 1))


# evaluations: the loss of all rows as one batch


def evaluation(how="compute_loss", **options):
    return case("evaluation", how=how, **options)


def evaluated(function, name, **options):
    "A loss of above, evaluated."
    CASES[name] = Case("evaluation", name, function, **options)


for function in (
    symmetric_infonce,
    ranknet_all_pairs,
    plain_sum,
    class_weights,
    token_mean_and_row_mean,
    mean_of_group_means,
    root_of_mean_square,
    at_least_forty_targets,
    rare_class_clamped,
    nan_for_an_empty_part,
    mean_tokens_then_rows,
    sum_by_count,
    logits_standardised_in_batch,
    eight_hardest_rows,
):
    evaluated(function, "evaluation: " + function.__name__.replace("_", " "))
for name in (
    "labels are arange",
    "truncated to the shortest row",
    "rows left out",
    "pairs in halves",
    "random masking",
    "packed sequences",
    "labels popped from rows",
):
    old = CASES[name]
    evaluated(
        old.function,
        f"evaluation: {name}",
        collate=old.collate,
        model=old.model,
        random=old.random,
    )


@evaluation("forward")
def another_loss_in_evaluation(o, b, s):
    return plain(o, b) if s.model.training else infonce(o, b)


@evaluation()
def under_no_grad(o, b, s):
    with torch.no_grad():
        return token_losses(o, b).sum() / (means(b) != -100).sum()


@evaluation(args=dict(prediction_loss_only=True))
def token_mean_alone(o, b, s):
    return ce(o["tokens"].flatten(0, 1), means(b))


@evaluation(
    given=dict(compute_metrics=lambda p: dict(of=float(np.mean(p.losses)))),
    args=dict(include_for_metrics=["loss"], per_device_eval_batch_size=30),
)
def losses_for_metrics(o, b, s):
    return ce(o["tokens"].flatten(0, 1), means(b))


@evaluation(args=dict(eval_on_start=True))
def begins_after_the_first_evaluation(o, b, s):
    return plain(o, b) if s.step < 1 else infonce(o, b)


@evaluation(args=dict(eval_sets=2))
def second_data_set_has_other_terms(o, b, s):
    return plain(o, b) if len(b["labels"]) and b["group"].amax() < 4 else infonce(o, b)


# predictions: what transformers gives for all rows as one batch


def prediction(loss=plain, **options):
    "A case is a model; what it gives besides the loss is compared."

    def keep(cls):
        made = case("prediction", how="forward", model=cls, **options)(cls)
        CASES[cls.__name__.replace("_", " ")].function = loss
        return made

    return keep


def gives(outputs, name, **options):
    "A model whose outputs are what a function makes of outputs and batch."

    class Gives(Net):
        def forward(self, **b):
            return outputs(super().forward(**b), b)

    CASES[name] = Case(
        "prediction", name, options.pop("loss", plain), "forward", Gives, **options
    )


def logits_and(**more):
    return lambda o, b: (
        dict(logits=o["logits"], h=o["h"]) | {k: f(o, b) for k, f in more.items()}
    )


gives(
    logits_and(deep=lambda o, b: {"a": (o["h"], [o["z"], {"b": o["value"]}])}),
    "nested outputs",
)
gives(
    lambda o, b: dict(logits=o["value"].squeeze()),
    "squeezed to rows",
    loss=lambda o, b, s: F.mse_loss(o["logits"].view(-1), b["score"]),
)
gives(lambda o, b: dict(logits=o["logits"], mean=o["h"].mean(0)), "mean over the batch")
gives(lambda o, b: dict(logits=o["logits"] - o["logits"].mean(0)), "logits less their mean")
gives(
    lambda o, b: dict(logits=o["logits"], order=o["value"].argsort()), "places in the batch"
)
gives(
    lambda o, b: dict(logits=o["logits"], best=o["value"].topk(2)[0]),
    "two best of the batch",
)
gives(
    lambda o, b: dict(logits=o["logits"], sure=o["logits"].amax(1) > 0.1), "true or false"
)
gives(lambda o, b: dict(logits=o["logits"], one=torch.tensor(3.0)), "one number for all")
gives(lambda o, b: dict(logits=o["logits"], table=torch.eye(3)), "a table of the model")
gives(lambda o, b: dict(logits=o["logits"], near=o["h"] @ o["h"].T), "rows by rows")
gives(
    lambda o, b: dict(logits=o["logits"], states=o["tokens"].transpose(0, 1)),
    "time comes first",
)
gives(lambda o, b: dict(logits=o["logits"], tokens=o["tokens"]), "logits of tokens")
gives(
    lambda o, b: dict(logits=o["logits"], real=o["tokens"][b["attention_mask"] > 0]),
    "real tokens only",
)
gives(
    lambda o, b: dict(logits=o["logits"], copies=o["h"].repeat_interleave(2, 0)),
    "two entries of a row",
)
gives(
    lambda o, b: dict(logits=o["logits"], blocks=torch.cat([o["h"], o["z"]])),
    "two blocks of rows",
)
gives(
    lambda o, b: dict(logits=o["logits"], past_key_values=((o["tokens"], o["tokens"]),)),
    "keys and values of the past",
)
gives(lambda o, b: dict(logits=o["logits"], h=o["h"].bfloat16()), "outputs in bfloat16")
gives(
    lambda o, b: dict(logits=o["logits"], ids=b["input_ids"] * b["attention_mask"]),
    "ids of rows",
)
gives(
    lambda o, b: dict(logits=o["tokens"].argmax(-1) - 100),
    "numbers that look like padding",
    loss=lambda o, b, s: (o["logits"] * 0.0).mean(),
)
gives(
    lambda o, b: dict(
        logits=o["logits"], rank=b["score"].argsort().argsort() / len(b["score"])
    ),
    "ranks in the batch",
)
gives(
    logits_and(),
    "several labels",
    args=dict(label_names=["labels", "score", "token_labels"]),
)
gives(logits_and(), "one other label", args=dict(label_names=["group"]))
gives(
    logits_and(),
    "metrics of losses and inputs",
    args=dict(include_for_metrics=["loss", "inputs"]),
    given=dict(
        compute_metrics=lambda p: dict(
            of=float(p.predictions[0].sum()) + float(np.sum(p.inputs > 0))
        )
    ),
)
gives(
    logits_and(),
    "logits prepared for metrics",
    given=dict(preprocess_logits_for_metrics=lambda logits, labels: logits[0].argmax(-1)),
)
gives(
    logits_and(),
    "metrics batch by batch",
    args=dict(batch_eval_metrics=True),
    given=dict(
        compute_metrics=lambda p, compute_result: dict(of=float(p.predictions[0].sum()))
    ),
)
gives(logits_and(), "rows that are left out", collate=rows_left_out)
gives(
    logits_and(ids=lambda o, b: b["input_ids"]),
    "rows truncated to the shortest",
    collate=truncated_to_the_shortest_row,
)
gives(logits_and(), "rows sorted by length", collate=sorted_by_length)


@prediction()
class batch_norm_without_statistics(Net):
    def __init__(self):
        super().__init__()
        self.n = nn.BatchNorm1d(3, track_running_stats=False)

    def forward(self, **b):
        return dict(logits=self.n(super().forward(**b)["logits"]))


@prediction(collate=packed_sequences)
class packed_outputs(Packed):
    def forward(self, ids, **b):
        out = self.r(ids._replace(data=self.e(ids.data)))[0]
        return super().forward(ids) | dict(states=out)
