"""Cases that were written later, by readers who had not seen how steps are computed.

`FIRST`: what practitioners do. `LATE`: conditions that no step or only a later one meets.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from batches_cases import (
    CASES,
    Net,
    ce,
    collate,
    collator,
    collator_class,
    evaluated,
    evaluation,
    infonce,
    loss,
    means,
    plain,
    row_losses,
    score_loss,
    token_losses,
    unit,
)

BEFORE = set(CASES)


class Heads(Net):
    def __init__(self):
        super().__init__()
        self.register_buffer("avg", torch.ones(3))
        self.register_buffer("calls", torch.zeros(()))


# losses


@loss()
def bounded_mean(o, b, s):
    return plain(o, b).clamp(max=1.1) + 0.1 * score_loss(o, b, s)


@loss("forward")
def precision_at_three(o, b, s):
    top = o["value"].topk(min(3, len(o["value"])))[1]
    return plain(o, b) - 0.5 * b["score"][top].mul(o["value"][top]).mean()


@loss()
def curriculum_by_step(o, b, s):
    l = row_losses(o, b)
    keep = l.sort()[0][: max(1, int(len(l) * min(1.0, 0.4 + 0.1 * s.step)))]
    return keep.mean()


@loss("forward", model=Heads)
def temperature_schedule_in_buffer(o, b, s):
    if s.model.training:
        s.model.calls += 1
    return ce(o["logits"] / (1 + 0.3 * s.model.calls), b["labels"])


@loss()
def winsorised_rows(o, b, s):
    l = row_losses(o, b)
    return torch.minimum(l, l.detach().quantile(0.8)).mean()


@loss("forward", model=Heads)
def logit_adjusted_by_running_prior(o, b, s):
    n = torch.bincount(b["labels"], minlength=3).float()
    s.model.avg.mul_(0.9).add_(n / n.sum(), alpha=0.1)
    return ce(o["logits"] + s.model.avg.log(), b["labels"])


@loss("loss_func")
def effective_number_balance(o, b, s):
    n = torch.bincount(b["labels"], minlength=3)
    w = (1 - 0.9) / (1 - 0.9 ** n.clamp(min=1).float())
    return (w[b["labels"]] * ce(o["logits"], b["labels"], reduction="none")).mean()


@loss()
def ohem_above_threshold(o, b, s):
    l = token_losses(o, b)[means(b) != -100]
    hard = l[l > 1.2]
    if len(hard) < 8:
        hard = l.topk(min(8, len(l)))[0]
    return hard.mean()


@loss("forward")
def heads_mixed_by_softmax_of_losses(o, b, s):
    terms = torch.stack(
        [plain(o, b), score_loss(o, b, s), token_losses(o, b).sum() / (means(b) != -100).sum()]
    )
    return (terms.detach().softmax(0) * terms).sum()


@loss()
def bootstrapped_noisy_labels(o, b, s):
    p = o["logits"].softmax(1).detach()
    sure = p.amax(1) > p.amax(1).mean()
    y = torch.where(sure, p.argmax(1), b["labels"])
    return ce(o["logits"], y)


@loss()
def r1_on_inputs(o, b, s):
    x = b["x"].clone().requires_grad_()
    v = s.model(**{**b, "x": x})["value"]
    (g,) = torch.autograd.grad(v.sum(), x, create_graph=True)
    return plain(o, b) + g.pow(2).sum(1).mean()


@loss()
def vat_with_normalised_direction(o, b, s):
    x = b["x"].clone().requires_grad_()
    (g,) = torch.autograd.grad(plain(s.model(**{**b, "x": x}), b), x)
    q = s.model(**{**b, "x": b["x"] + g / (g.norm() + 1e-8)})["logits"]
    return plain(o, b) + F.kl_div(
        q.log_softmax(1), o["logits"].softmax(1).detach(), reduction="batchmean"
    )


@loss()
def consistency_of_swapped_views(o, b, s):
    q = s.model(**{**b, "x": b["x2"]})["logits"].log_softmax(1)
    p = o["logits"].log_softmax(1)
    return (
        plain(o, b)
        + (
            F.kl_div(q, p, log_target=True, reduction="batchmean")
            + F.kl_div(p, q, log_target=True, reduction="batchmean")
        )
        / 2
    )


@loss("forward")
def rate_by_batch_size(o, b, s):
    return plain(o, b) * (len(b["labels"]) / 12) ** 0.5


@loss()
def other_term_for_small_batches(o, b, s):
    return plain(o, b) if len(b["labels"]) >= 8 else score_loss(o, b, s)


@loss()
def by_the_longest_row(o, b, s):
    l = token_losses(o, b).view(b["input_ids"].shape).sum(1)
    return (l / b["input_ids"].shape[1]).mean()


@loss("forward")
def late_positions_count_more(o, b, s):
    n = b["input_ids"].shape[1]
    l = token_losses(o, b).view(-1, n) * torch.linspace(0.5, 1.5, n)
    return l.sum() / (means(b) != -100).sum()


@loss()
def equal_labels_agree(o, b, s):
    _, inverse, n = b["group"].unique(return_inverse=True, return_counts=True)
    return (row_losses(o, b) / n[inverse]).sum() / len(n)


@loss()
def earth_mover_of_sorted_values(o, b, s):
    return (o["value"].sort()[0] - b["score"].sort()[0]).abs().mean()


@loss()
def first_row_is_anchor(o, b, s):
    h = unit(o["h"])
    return plain(o, b) + (1 - h[1:] @ h[0].detach()).mean() if len(h) > 1 else plain(o, b)


@loss()
def dice_over_batch(o, b, s):
    p, y = o["logits"].softmax(1), F.one_hot(b["labels"], 3)
    return (1 - (2 * (p * y).sum(0) + 1) / (p.sum(0) + y.sum(0) + 1)).mean()


@loss()
def stops_when_good_enough(o, b, s):
    m = plain(o, b)
    if m.item() < 1.12:
        s.memory["on"] = True
    return m + (0.3 * infonce(o, b) if s.memory.get("on") else 0.0)


# collators


@collator(lambda o, b, s: (row_losses(o, b) * b["w"]).sum())
def weights_from_ranks_of_scores(rows):
    w = torch.tensor([r["score"] for r in rows]).argsort().argsort().float() + 1
    return collate(rows) | dict(w=w / w.sum())


@collator(
    lambda o, b, s: (
        b["lam"] * row_losses(o, b) + (1 - b["lam"]) * ce(o["logits"], b["other"], reduction="none")
    ).mean()
)
def cutmix_with_the_last_row(rows):
    b = collate(rows)
    x = b["x"].clone()
    x[:, :4] = b["x"].flip(0)[:, :4]
    return b | dict(x=x, other=b["labels"].flip(0), lam=torch.full((len(rows),), 2 / 3))


@collator()
def truncated_to_the_median_length(rows):
    n = int(np.median([len(r["input_ids"]) for r in rows]))
    return collate(
        [r | dict(input_ids=r["input_ids"][:n], token_labels=r["token_labels"][:n]) for r in rows]
    )


@collator()
def width_by_buckets_of_eight(rows):
    b = collate(rows)
    n = b["input_ids"].shape[1]
    more = -n % 8
    for k, v in (("input_ids", 0), ("attention_mask", 0), ("token_labels", -100)):
        b[k] = F.pad(b[k], (0, more), value=v)
    return b


@collator()
def an_all_mean_row_is_added(rows):
    b = collate(rows)
    return {k: torch.cat([v, v[:1]]) for k, v in b.items()} | dict(
        x=torch.cat([b["x"], b["x"].mean(0, True)])
    )


@collator()
def rare_class_doubled(rows):
    y = [r["labels"] for r in rows]
    rare = min(set(y), key=lambda c: (y.count(c), c))
    return collate(rows + [r for r in rows if r["labels"] == rare])


class Glued(nn.Module):
    def __init__(self):
        super().__init__()
        self.e, self.o = nn.Embedding(30, 16), nn.Linear(16, 3)
        self.t = nn.Parameter(torch.ones(2))

    def forward(self, ids, doc, labels=None, **rest):
        h = torch.zeros(int(doc.max()) + 1, 16).index_add(0, doc[0], self.e(ids[0]))
        return dict(logits=self.o(h.tanh()), h=h)


@collator(lambda o, b, s: ce(o["logits"], b["classes"]), model=Glued)
def glued_to_one_row_with_documents(rows):
    ids = torch.tensor([i for r in rows for i in r["input_ids"]])[None]
    doc = torch.tensor([n for n, r in enumerate(rows) for _ in r["input_ids"]])[None]
    return dict(ids=ids, doc=doc, classes=torch.tensor([r["labels"] for r in rows]))


@collator(lambda o, b, s: ce(o["tokens"].flatten(0, 1), b["token_labels"].flatten()))
def long_rows_split_in_two(rows):
    out = []
    for r in rows:
        for a in range(0, len(r["input_ids"]), 6):
            out.append(
                r
                | dict(
                    input_ids=r["input_ids"][a : a + 6], token_labels=r["token_labels"][a : a + 6]
                )
            )
    return collate(out)


@collator(lambda o, b, s: F.mse_loss(o["value"], b["residual"]))
def residuals_to_group_means(rows):
    b = collate(rows)
    m = torch.zeros(4).scatter_reduce(0, b["group"], b["score"], "mean", include_self=False)
    return b | dict(residual=b["score"] - m[b["group"]])


class Weighs(Net):
    def forward(self, stats, **b):
        b["x"] = b["x"] - stats["mean"]
        return super().forward(**b)


@collator(model=Weighs)
def numpy_statistics_beside_rows(rows):
    b = collate(rows)
    return b | dict(stats=dict(mean=b["x"].mean(0, keepdim=True).expand(len(rows), -1).clone()))


# evaluations

evaluated(bounded_mean, "evaluation: bounded mean")
evaluated(earth_mover_of_sorted_values, "evaluation: sorted values")
evaluated(dice_over_batch, "evaluation: dice over batch")
evaluated(winsorised_rows, "evaluation: winsorised rows")
evaluated(plain, "evaluation: median length", collate=truncated_to_the_median_length)
evaluated(plain, "evaluation: rare class doubled", collate=rare_class_doubled)


@evaluation("forward", model=Heads)
def running_mean_in_evaluation(o, b, s):
    s.model.calls += 1
    return plain(o, b) / s.model.calls.clone()


@evaluation(
    given=dict(
        compute_metrics=lambda p: dict(
            of=float(np.corrcoef(p.predictions[0][:, 0], p.label_ids)[0, 1])
        )
    )
)
def correlation_as_metric(o, b, s):
    return plain(o, b) + o["value"].var()


FIRST = [name for name in CASES if name not in BEFORE]

# conditions


@loss()
def outlier_batches_add_variance(o, b, s):
    return plain(o, b) + (o["value"].var() if b["score"].amax() > 1.9 else 0.0)


@loss()
def queue_used_when_full(o, b, s):
    q = s.memory.setdefault("q", [])
    l = plain(o, b)
    if len(q) >= 36:
        l = l + ce(unit(o["h"]) @ torch.stack(q[-36:]).T, torch.zeros(len(o["h"])).long())
    q.extend(unit(o["h"]).detach())
    return l


@loss()
def pairs_from_a_seeded_generator(o, b, s):
    p = torch.randperm(len(o["h"]), generator=torch.Generator().manual_seed(s.step))
    return plain(o, b) + F.mse_loss(o["h"], o["h"][p])


@loss()
def shapes_of_long_batches(o, b, s):
    l = token_losses(o, b).sum() / (means(b) != -100).sum()
    return l * 8 / b["input_ids"].shape[1] if b["input_ids"].numel() > 130 else l


@loss()
def close_scores_agree(o, b, s):
    d = (b["score"][:, None] - b["score"]).abs()
    near = torch.triu(d < 0.01, 1)
    v = (o["value"][:, None] - o["value"]).pow(2)
    return plain(o, b) + (v * near).sum()


@loss()
def first_class_missing(o, b, s):
    return (
        plain(o, b)
        if (b["labels"] == 0).sum() > 1
        else plain(o, b) + o["logits"].mean(0).pow(2).sum()
    )


@loss()
def ties_of_groups_over_four(o, b, s):
    n = torch.bincount(b["group"], minlength=4)
    return plain(o, b) * (1.5 if n.max() > 5 else 1.0)


@collator()
def long_batches_are_truncated(rows):
    n = 8 if sum(len(r["input_ids"]) for r in rows) > 95 else 99
    return collate(
        [r | dict(input_ids=r["input_ids"][:n], token_labels=r["token_labels"][:n]) for r in rows]
    )


@collator()
def big_batches_swap_neighbours_x(rows):
    b = collate(rows)
    return b | dict(x=b["x"].roll(1, 0) * 0.5 + b["x"] * 0.5) if len(rows) > 10 else b


@collator(lambda o, b, s: (row_losses(o, b) * b["w"]).mean())
def one_label_only_counts_less(rows):
    b = collate(rows)
    c = torch.bincount(b["labels"], minlength=3)
    return b | dict(w=torch.full((len(rows),), 0.5 if c.max() > 7 else 1.0))


class NoMask(Net):
    def forward(self, input_ids, attention_mask, **b):
        return super().forward(input_ids, torch.ones_like(attention_mask), **b)


@collator(model=NoMask)
def model_without_mask(rows):
    return collate(rows)


class Norms(Net):
    def __init__(self):
        super().__init__()
        self.n = nn.BatchNorm1d(16)

    def forward(self, **b):
        o = super().forward(**b)
        return o | dict(logits=self.o(self.n(o["h"])))


@collator(model=Norms)
def batch_norm_in_training(rows):
    return collate(rows)


@collator_class()
class longer_with_every_call:
    def __init__(self):
        self.calls = 0

    def __call__(self, rows):
        self.calls += 1
        n = 3 + 2 * self.calls
        return collate(
            [
                r | dict(input_ids=r["input_ids"][:n], token_labels=r["token_labels"][:n])
                for r in rows
            ]
        )


evaluated(outlier_batches_add_variance, "evaluation: outliers add variance")
evaluated(plain, "evaluation: model without mask", model=NoMask)

LATE = [name for name in CASES if name not in {*BEFORE, *FIRST}]
