"""The report of `khot select`: one HTML file."""

from __future__ import annotations

import platform

import numpy as np
import torch

from .._version import __version__
from ._charts import Bar, bars, lines, pixels
from ._html import Html, dim, figure, page, paragraph, section, table, tag
from ._select import Selection

SHOWN = 30
"""Features in the picture, at most."""
MEASURES = {"classification": "accuracy", "regression": "R²", "reconstruction": "R² of all features"}
MODELS = {
    ("linear", "classification"): "logistic regression",
    ("linear", "regression"): "ridge regression",
    ("linear", "reconstruction"): "ridge regression",
    ("forest", "classification"): "a random forest",
    ("forest", "regression"): "a random forest",
    ("forest", "reconstruction"): "a random forest",
}


def report(s: Selection, command: str) -> str:
    """All of it."""
    return page(
        f"{s.k} of {len(s.features)} features: {s.table.source}",
        _summary(s),
        section("What was chosen", *_chosen(s)),
        section("Against other choices", *_comparison(s)),
        section("How it went", *_training(s)),
        section("To do it again", tag("pre", command), dim(_versions())),
    )


def verdict(s: Selection) -> str:
    """In a sentence: whose choice scores best, of those that choose k."""
    rivals = {name: score for name, score in s.scores.items() if name not in ("khot", "all features", "random")}
    rivals = {name: score for name, score in rivals.items() if "not a choice" not in name}
    if "khot" not in s.scores:
        return "The comparison was cut short."
    if not rivals:
        return ""
    name, best = max(rivals.items(), key=lambda item: item[1].mean)
    ours = s.scores["khot"]
    difference = ours.mean - best.mean
    if abs(difference) <= max(ours.std, best.std):
        return f"khot's choice and {name}'s cannot be told apart ({difference:+.3f}, within the spread of the folds)."
    if difference > 0:
        return f"khot's choice is ahead of the best other one, {name}'s, by {difference:.3f}."
    return f"{name}'s choice is ahead of khot's by {-difference:.3f}: take that one."


def measure(s: Selection) -> str:
    """What the scores are."""
    return f"{MEASURES[s.task]} of {MODELS[s.model, s.task]}"


def _summary(s: Selection) -> Html:
    rows = len(s.table.x)
    target = f", to predict {s.table.target}" if s.task != "reconstruction" else ", to reconstruct all of them"
    parts = [paragraph(f"{s.task.capitalize()}: {rows} rows, {len(s.features)} features{target}.")]
    if not s.is_whole:
        parts.append(paragraph(tag("strong", "Cut short"), ": this is the best so far."))
    parts += [dim(note) for note in s.table.notes]
    return Html("".join(parts))


def _chosen(s: Selection) -> list[Html]:
    parts = []
    if s.table.image is not None:
        place = {name: i for i, name in enumerate(s.table.names)}
        values, chosen = np.zeros(len(place)), np.zeros(len(place), dtype=bool)
        for feature in s.features:
            values[place[feature.name]] = feature.inclusion_probability
            chosen[place[feature.name]] = feature.rank <= s.k
        shape = s.table.image
        picture = pixels(
            values.reshape(shape).tolist(), chosen.reshape(shape).tolist(), description="the chosen pixels"
        )
        parts.append(figure(picture, "The chosen pixels are framed; the darker, the more probable."))
    shown = s.features[: max(s.k, SHOWN)][:SHOWN]
    items = [Bar(f.name, f.inclusion_probability, 0.0, f.rank <= s.k) for f in shown]
    caption = "Inclusion probabilities: they sum to k over all features. "
    caption += "The chosen ones are coloured." + (f" The first {SHOWN} are shown." if len(s.features) > SHOWN else "")
    parts.append(figure(bars(items, top=1.0, description="inclusion probabilities of features"), caption))
    rows = [[f.name, str(f.rank), f"{f.inclusion_probability:.3f}"] for f in s.chosen]
    parts.append(table(["feature", "rank", "inclusion probability"], rows))
    return parts


def _comparison(s: Selection) -> list[Html]:
    if not s.scores:
        return [paragraph("It was not begun.")]
    items = [Bar(name, score.mean, score.std, name == "khot") for name, score in s.scores.items()]
    rows = [[name, f"{score.mean:.3f}", f"{score.std:.3f}"] for name, score in s.scores.items()]
    return [
        paragraph(verdict(s)),
        figure(bars(items, description="scores of the methods"), f"{measure(s)}, cross-validated."),
        table(
            ["features by", "mean", "standard deviation"],
            rows,
            marked=[i for i, r in enumerate(rows) if r[0] == "khot"],
        ),
        dim("Each method chooses anew in every fold, on the rows that are not scored; the model is the same for all."),
    ]


def _training(s: Selection) -> list[Html]:
    curves = {
        "held out, the k best": [(e["step"], e["validation_loss"]) for e in s.history],
        "training, samples": [(e["step"], e["train_loss"]) for e in s.history],
    }
    budget = {"features let through": [(e["step"], e["budget"]) for e in s.history]}
    return [
        figure(
            lines(curves, x_label="step", y_label="loss", description="losses during training"),
            "The loss with the k best features alone, on rows held out, and with the samples it was trained on.",
        ),
        figure(
            lines(budget, x_label="step", y_label="features", log_y=True, description="features let through"),
            f"Samples begin with all features and end with {s.k}.",
        ),
    ]


def _versions() -> str:
    import sklearn

    return (
        f"khot {__version__}, torch {torch.__version__}, numpy {np.__version__}, "
        f"scikit-learn {sklearn.__version__}, Python {platform.python_version()}"
    )
