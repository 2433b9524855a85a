"""The report of `khot select`: one HTML file; and its sentences, which the command line prints too."""

import math

import numpy as np

from ._page import Html, dim, figure, lines, meter, page, pairs, pixels, section, table, tag
from .select import PAIRS, RIVALS, XOR, Feature, Score, Selection

SHOWN = 30  # largest number of features in the picture
STAND_INS = 3  # largest number of features named for each chosen one
EXAMPLES = 10  # largest number of images in the picture
PRACTICAL = 0.005  # smallest difference, as a fraction of the score, that is of any use
UNSEEN = 0.1  # smallest difference of R² between trees and a linear model on the choice that is told
MEASURES = {"classification": "accuracy", "regression": "R²", "reconstruction": "R² of all features"}


def report(s: Selection, command: str) -> str:
    """Make the page; `command` is what the user typed."""
    target = f", to predict {s.table.target}" if s.task != "reconstruction" else ", to reconstruct all of them"
    summary = [tag("p", f"{s.task.capitalize()}: {len(s.table.x)} rows, {len(s.features)} features{target}.")]
    if said := headline(s):
        summary.insert(0, tag("p", tag("strong", said)))
    if not s.is_complete:
        summary.append(tag("p", tag("strong", "Cut short"), ": this is the best so far."))
    together = [tag("p", xor_verdict(s)), table(XOR_HEADER, xor_rows(s), [0])] if s.xor else []
    return page(
        f"{s.k} of {len(s.features)} features: {s.table.source}",
        *_examples(s),
        *(summary + [tag("p", tag("strong", "Warning"), f": {said}") for said in s.warnings]),
        *(dim(note) for note in s.table.notes),
        section("What was chosen", *_chosen(s)),
        section("Against other choices", *_comparison(s)),
        *([section("Two columns that matter only together", *together)] if s.xor else []),
        *([section("Who chose", *decided)] if (decided := _decision(s)) else []),
        command=command,
        packages=("torch", "numpy", "scikit-learn"),
    )


def headline(s: Selection) -> str:
    """Say in a sentence what the choice is worth, and what all features are; empty if that is not known."""
    scores = [s.scores[name].mean if name in s.scores else math.nan for name in ("khot", "all features")]
    if not all(score > 0 for score in scores):
        return ""
    chosen, whole = (f"{100 * score:.1f} %" for score in scores)
    kind = "pixels" if s.table.image else "features"
    many, end = ("reach", " accuracy") if s.task == "classification" else ("explain", " of the variance")
    kind, verb = (kind[:-1], f"{many}{'es' if many == 'reach' else 's'}") if s.k == 1 else (kind, many)
    return f"{s.k} {kind} of {len(s.features)} {verb} {chosen}{end}; all of them {many} {whole}."


def verdict(s: Selection) -> str:
    """Say in a sentence or two whose choice of k scores best, and whether any choice is of use."""
    if "khot" not in s.scores:
        return "The comparison was cut short."
    known = {name: score for name, score in s.scores.items() if all(map(math.isfinite, score.folds))}
    if "khot" not in known:
        return "khot's choice has no score: a fold could not be fitted."
    said = []
    if rivals := {name: score for name, score in known.items() if name in RIVALS}:
        name = max(rivals, key=lambda name: rivals[name].mean)
        mean, error = _difference(known["khot"], rivals[name])
        told, first = f"{abs(mean):.3f} ± {error:.3f}", "khot" if mean > 0 else name
        if abs(mean) < PRACTICAL * abs(known["khot"].mean):
            said.append(f"There is no practical difference between khot's choice and {name}'s.")
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
    return " ".join([*said, *_unseen(s)])


def _unseen(s: Selection) -> list[str]:
    """Say that a linear model sees little of the choice, if trees see more of it."""
    best = s.candidates[0] if s.candidates and _has_trees(s) else {"linear": 0.0, "boosted": 0.0}
    if s.model != "linear" or best["boosted"] - max(best["linear"], 0.0) < UNSEEN:
        return []
    told = f"R² {best['boosted']:.2f} against {best['linear']:.2f}"
    return [f"Boosted trees predict more from khot's choice than a linear model, {told}: compare with --model forest."]


def spent(s: Selection) -> list[str]:
    """Say what the choice costs, if there is a budget."""
    return [] if s.cost is None else [f"The choice costs {s.cost[0]:g} of the budget of {s.cost[1]:g}."]


def _difference(a: Score, b: Score) -> tuple[float, float]:
    """Return the mean difference over folds, and its standard error."""
    each = np.array(a.folds) - np.array(b.folds)
    return float(each.mean()), float(each.std(ddof=1) / math.sqrt(len(each)))


XOR_HEADER = ("features by", "chose", "right", "accuracy on new rows")


def xor_rows(s: Selection) -> list[list[str]]:
    """Return rows of a table: a method, its two columns, how many are right, and what they are worth."""
    return [
        [name, ", ".join(f"x{i}" for i in found.columns), f"{found.right} of 2", f"{found.accuracy:.3f}"]
        for name, found in s.xor.items()
    ]


def xor_verdict(s: Selection) -> str:
    """Say what was looked for, and who found it."""
    rows, n, (a, b) = XOR
    task = f"{rows} rows of {n} columns of noise; the label is whether x{a} and x{b} have the same sign. "
    task += "Neither column alone says anything about it, and accuracy by chance is 0.5. "
    winners = [name for name, found in s.xor.items() if found.right == 2]
    return task + (f"Both were found by {' and '.join(winners)} alone." if winners else "Nobody found both.")


def measure(s: Selection) -> str:
    """Name what the scores measure."""
    linear = "logistic regression" if s.task == "classification" else "ridge regression"
    return f"{MEASURES[s.task]} of {linear if s.model == 'linear' else 'a random forest'}"


def _is_chosen(s: Selection) -> np.ndarray:
    chosen = {feature.name for feature in s.chosen}
    return np.array([name in chosen for name in s.table.names]).reshape(s.table.image or -1)


def _examples(s: Selection) -> list[Html]:
    """Show an image of each class, whole and at the chosen pixels."""
    if s.table.image is None:
        return []
    y = s.table.y if s.task == "classification" and s.table.y is not None else np.arange(len(s.table.x))
    first = np.unique(y, return_index=True)[1]
    images = s.table.x[first[:EXAMPLES]].reshape(-1, *s.table.image)
    picture = pairs(images, _is_chosen(s), description="images, whole and as the chosen pixels see them")
    return [figure(picture, f"Above: whole images. Below: what the {s.k} chosen pixels see of them.")]


def _chosen(s: Selection) -> list[Html]:
    parts = []
    if s.table.image is not None:
        known = {feature.name: feature.inclusion_probability for feature in s.features}
        values = np.array([known[name] for name in s.table.names]).reshape(s.table.image)
        picture = pixels(values, _is_chosen(s), description="the chosen pixels")
        parts.append(figure(picture, "The chosen pixels are framed; the stronger the colour, the more probable."))
    folds = stability_header(s)
    rows = [
        [
            f.name,
            meter(p := f.inclusion_probability, is_marked=f.rank <= s.k),
            f"{p:.3f}",
            *missed(s, f),
            *in_folds(s, f),
        ]
        for f in s.features[:SHOWN]
    ]
    parts.append(table(["feature", "", "inclusion probability", *missed_header(s), *folds], rows, range(s.k)))
    if missed_header(s):
        told = "Lost without: by how much the held-out error rises without the feature, of that of no features at all"
        parts.append(
            dim(f"{told}, ± its standard error. Features are ranked by it; the probability says how sure it is.")
        )
    more = f" The first {SHOWN} are shown." if len(s.features) > SHOWN else ""
    how = " Chosen in folds, in halves: how often it is chosen again from a part of the rows." if folds else ""
    parts += [tag("p", said) for said in (*spent(s), *similar(s), *discovered(s))]
    return [*parts, dim(f"Inclusion probabilities sum to k over all features.{how}{more}")]


def stability_header(s: Selection) -> list[str]:
    """Return the names of the columns of `in_folds`, if there are any."""
    first = s.features[0] if s.features else None
    names = [("chosen in folds", first and first.stability), ("in halves", first and first.subsamples)]
    return [name for name, share in names if share is not None]


def in_folds(s: Selection, feature: Feature) -> list[str]:
    """Say in how many folds, and in how many random halves of the rows, a feature was chosen."""
    counts = sum(map(math.isfinite, s.scores["khot"].folds)) if "khot" in s.scores else 0, 2 * PAIRS
    shares = zip((feature.stability, feature.subsamples), counts, strict=True)
    return [f"{round(share * count)} of {count}" for share, count in shares if share is not None]


def missed_header(s: Selection) -> list[str]:
    """Return the name of the column of `missed`, if there is one."""
    return ["lost without"] if any(feature.loss is not None for feature in s.features) else []


def missed(s: Selection, feature: Feature) -> list[str]:
    """Say by how much the held-out loss rises without a chosen feature."""
    if not missed_header(s):
        return []
    if feature.loss is None or feature.error is None:
        return [""]
    return [f"{_rounded(100 * feature.loss, 2)} ± {_rounded(100 * feature.error, 1)} %"]


def _rounded(value: float, digits: int) -> str:
    """Round to significant digits, at most four of them behind the point, and write no exponent."""
    shown = f"{float(f'{value:.{digits}g}'):.4f}".rstrip("0").rstrip(".")
    return "0" if shown == "-0" else shown


def similar(s: Selection) -> list[str]:
    """Say which features could stand in for chosen ones."""
    said, chosen = [], {feature.name for feature in s.chosen}
    for feature in s.chosen:
        for other, r in feature.stand_ins[:STAND_INS]:
            if other not in chosen:
                said.append(f"{other} could stand in for {feature.name}, r = {r:.2f}.")
            elif other > feature.name:
                said.append(f"{feature.name} and {other} are both chosen and nearly the same, r = {r:.2f}.")
    return said


def _comparison(s: Selection) -> list[Html]:
    if not s.scores:
        return [tag("p", "It was not begun.")]
    best = max((score.mean for score in s.scores.values() if math.isfinite(score.mean)), default=1.0)
    rows = [
        [name, meter(score.mean, best, is_marked=name == "khot"), f"{score.mean:.3f} ± {score.std:.3f}"]
        for name, score in s.scores.items()
    ]
    what = f"{measure(s)[0].upper()}{measure(s)[1:]}, cross-validated: mean and standard deviation over folds."
    fair = "Each method chooses anew in every fold, on the rows that are not scored; the model is the same for all."
    return [tag("p", verdict(s)), table(["features by", "", measure(s)], rows, [0]), dim(f"{what} {fair}")]


def candidates_header(s: Selection) -> list[str]:
    """Return the columns of `candidate_rows`."""
    is_clipped = any(c[kind] < 0 for c in s.candidates for kind in _kinds(s))
    shown = ["R², linear", "R², boosted trees"] if _has_trees(s) else ["R², linear"]
    return ["strategy", *shown, "mean, R² < 0 as 0" if is_clipped else "mean"]


def candidate_rows(s: Selection) -> list[list[str]]:
    """Return rows of a table: a strategy, and what its choices were worth on held-out rows."""
    kinds = _kinds(s)
    errors = [f" ± {c['error']:.3f}" if c["error"] else "" for c in s.candidates]
    return [
        [c["candidate"], *(f"{c[kind]:.3f}" for kind in kinds), f"{c['score']:.3f}{error}"]
        for c, error in zip(s.candidates, errors, strict=True)
    ]


def _kinds(s: Selection) -> list[str]:
    return ["linear", "boosted"] if _has_trees(s) else ["linear"]


def _has_trees(s: Selection) -> bool:
    return all("boosted" in candidate for candidate in s.candidates)


def sure(s: Selection) -> list[str]:
    """Say how k was found."""
    if not s.curve:
        return []
    best = max(s.curve, key=lambda row: row["score"])
    said = f"k = {s.k} is the smallest number whose score is within a standard error of the best"
    return [f"{said}, {best['score']:.3f} ± {best['error']:.3f} at k = {best['k']:.0f}."]


def discovered(s: Selection) -> list[str]:
    """Say what knockoffs found."""
    if s.discoveries is None:
        return []
    found = s.discoveries.names(s.names)
    bound = f"of which at most {s.discoveries.q:.0%} are expected to be false (Gaussian knockoffs)"
    if not found:
        least = math.ceil(1 / s.discoveries.q)
        return [f"Knockoffs found no feature at this bound; with few that matter, less than {least}, they cannot."]
    return [f"{len(found)} features matter, {bound}: {', '.join(found)}."]


def _decision(s: Selection) -> list[Html]:
    parts: list[Html] = [tag("p", said) for said in sure(s)]
    if s.curve:
        curve = {"score": [(row["k"], row["score"]) for row in s.curve]}
        caption = "The held-out score against the number of features; choices were made on other rows."
        parts.append(figure(lines(curve, y="score", x="features", description="score against k"), caption))
    if s.candidates:
        name = s.candidates[0]["candidate"]
        parts.append(
            tag("p", f"{name.capitalize()} chose: on rows held out, no other's choices were worth clearly more.")
        )
        parts.append(table(candidates_header(s), candidate_rows(s), [0]))
        how = (
            "Each strategy chose from training rows. A linear model and boosted trees on its columns scored the others."
        )
        parts.append(dim(f"{how} Of classes, R² is that of their indicators."))
    return parts
