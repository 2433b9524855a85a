"""The report of `khot select`: one HTML file."""

import math

import numpy as np

from ._page import Bar, Html, bars, dim, figure, lines, page, pixels, section, table, tag
from .select import Score, Selection

SHOWN = 30  # largest number of features in the picture
MEASURES = {"classification": "accuracy", "regression": "R²", "reconstruction": "R² of all features"}


def report(s: Selection, command: str) -> str:
    """Make the page; `command` is what the user typed."""
    target = f", to predict {s.table.target}" if s.task != "reconstruction" else ", to reconstruct all of them"
    summary = [tag("p", f"{s.task.capitalize()}: {len(s.table.x)} rows, {len(s.features)} features{target}.")]
    if not s.is_complete:
        summary.append(tag("p", tag("strong", "Cut short"), ": this is the best so far."))
    return page(
        f"{s.k} of {len(s.features)} features: {s.table.source}",
        *(summary + [dim(note) for note in s.table.notes]),
        section("What was chosen", *_chosen(s)),
        section("Against other choices", *_comparison(s)),
        section("How it went", *_training(s)),
        command=command,
        packages=("torch", "numpy", "scikit-learn"),
    )


def verdict(s: Selection) -> str:
    """Say in a sentence or two whose choice of k scores best, and whether any choice is of use."""
    if "khot" not in s.scores:
        return "The comparison was cut short."
    known = {name: score for name, score in s.scores.items() if all(map(math.isfinite, score.folds))}
    if "khot" not in known:
        return "khot's choice has no score: a fold could not be fitted."
    said = []
    rivals = {name: score for name, score in known.items() if name in ("SelectKBest", "L1", "RFE")}
    if rivals:
        name = max(rivals, key=lambda name: rivals[name].mean)
        mean, error = _difference(known["khot"], rivals[name])
        told, first = f"{abs(mean):.3f} ± {error:.3f}", "khot" if mean > 0 else name
        if mean == 0:
            said.append(f"khot's choice and {name}'s score the same.")
        elif abs(mean) <= 2 * error:
            tie = f"khot's choice and {name}'s cannot be told apart"
            said.append(f"{tie}: {first}'s is ahead by {told}, fold by fold.")
        elif mean > 0:
            said.append(f"khot's choice is ahead of the best other one, {name}'s, by {told}.")
        else:
            said.append(f"{name}'s choice is ahead of khot's by {told}: take that one.")
    if "random" in known:
        mean, error = _difference(known["khot"], known["random"])
        if mean <= 2 * error:
            said.append("It is no better than random features.")
    if s.task != "classification" and max(score.mean for score in known.values()) <= 0:
        said.append("No choice predicts the target at all.")
    return " ".join(said)


def _difference(a: Score, b: Score) -> tuple[float, float]:
    """Return the mean difference over folds, and its standard error."""
    each = np.array(a.folds) - np.array(b.folds)
    return float(each.mean()), float(each.std(ddof=1) / math.sqrt(len(each)))


def measure(s: Selection) -> str:
    """Name what the scores measure."""
    linear = "logistic regression" if s.task == "classification" else "ridge regression"
    return f"{MEASURES[s.task]} of {linear if s.model == 'linear' else 'a random forest'}"


def _chosen(s: Selection) -> list[Html]:
    parts = []
    if s.table.image is not None:
        known = {feature.name: feature for feature in s.features}
        values = np.array([known[name].inclusion_probability for name in s.table.names]).reshape(s.table.image)
        chosen = np.array([known[name].rank <= s.k for name in s.table.names]).reshape(s.table.image)
        picture = pixels(values.tolist(), chosen.tolist(), description="the chosen pixels")
        parts.append(figure(picture, "The chosen pixels are framed; the darker, the more probable."))
    shown = s.features[:SHOWN]
    items = [Bar(f.name, f.inclusion_probability, 0.0, f.rank <= s.k) for f in shown]
    caption = "Inclusion probabilities: they sum to k over all features. "
    caption += "The chosen ones are coloured." + (f" The first {SHOWN} are shown." if len(s.features) > SHOWN else "")
    parts.append(figure(bars(items, top=1.0, description="inclusion probabilities of features"), caption))
    rows = [[f.name, str(f.rank), f"{f.inclusion_probability:.3f}"] for f in s.chosen]
    parts.append(table(["feature", "rank", "inclusion probability"], rows))
    return parts


def _comparison(s: Selection) -> list[Html]:
    if not s.scores:
        return [tag("p", "It was not begun.")]
    items = [Bar(name, score.mean, score.std, name == "khot") for name, score in s.scores.items()]
    rows = [[name, f"{score.mean:.3f}", f"{score.std:.3f}"] for name, score in s.scores.items()]
    marked = [i for i, name in enumerate(s.scores) if name == "khot"]
    what = measure(s)
    caption = f"{what[0].upper()}{what[1:]}, cross-validated; nothing is drawn below 0."
    return [
        tag("p", verdict(s)),
        figure(bars(items, description="scores of the methods"), caption),
        table(["features by", "mean", "standard deviation"], rows, marked),
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
