"""The report of `khot sae`: one HTML file."""

from typing import Any

from ..sae import Features, Point, Run
from . import _browser
from ._page import Html, dim, figure, lines, meter, page, section, table, tag

REPORT = "report.html"
FIGURES = {
    "fvu": "fraction of variance unexplained (FVU)",
    "explained_variance": "explained variance",
    "l0": "active latents a token (L0)",
    "alive": "fraction of latents that are active at all",
    "cosine": "cosine of input and reconstruction",
    "relative_reconstruction_bias": "relative reconstruction bias (1 is right)",
}
KINDS = {
    "topk": "k for each token (TopK)",
    "batch": "k a token in the mean (BatchTopK)",
    "feature": "tokens for each latent (Feature Choice)",
    "jumprelu": "what exceeds a learned threshold (JumpReLU)",
}
FRONTIER = ["", "L0", "FVU", "FVU, held out", "alive, %"]


def report(result: Run, source: str, command: str, found: Features | None = None) -> str:
    """Make the page; `source` is the name of the file of activations, `command` what the user typed.

    With `found`, what `khot.sae.features` returned, the page has a browser of the latents.
    """
    metrics, run = result.metrics, result.metrics["run"]
    how = f"{run['tokens']} tokens, {metrics['steps']} steps of {run['batch_size']}. "
    how += f"Selected: {KINDS[run['kind']]}; in training, {run['selector']}."
    summary = [tag("p", how), tag("p", verdict(metrics))]
    if not metrics["complete"]:
        summary.append(tag("p", tag("strong", "Cut short"), f" after {metrics['steps']} of {run['steps']} steps."))
    low, middle, high = (metrics["l0_percentiles"][p] for p in ("5", "50", "95"))
    spread = f"{low} to {high}, {middle} in the middle," if low < high else str(low)
    note = f"L0 is {spread} for nine tokens in ten, of {metrics['tokens']}."
    return page(
        f"{run['d_in']} → {run['latents']}, k = {run['k']:g}: {source}",
        *summary,
        *([_browser.browser(found)] if found else []),
        section("How good it is", table(["", "all tokens", "held out"], figures(metrics)), dim(note)),
        section("What is active", *_densities(metrics)),
        section("How it went", *_curves(result.curve)),
        command=command,
        packages=("torch", "numpy"),
        style=_browser.STYLE if found else "",
        script=_browser.SCRIPT if found else "",
    )


def sweep_report(runs: dict[str, Run], wanted: int, source: str, command: str) -> str:
    """Make the page of a sweep: the frontier, as a table and a picture; `wanted` is the number of runs asked for."""
    run = next(iter(runs.values())).metrics["run"]
    points = sorted((m["l0"], m["fvu"]) for m in (of.metrics for of in runs.values()) if m["fvu"] is not None)
    held = [(of.metrics["l0"], (of.metrics["held_out"] or {}).get("fvu")) for of in runs.values()]
    series = {"all tokens": points, "held out": sorted((x, y) for x, y in held if y is not None)}
    how = f"{run['tokens']} tokens, {run['steps']} steps of {run['batch_size']} for each. {KINDS[run['kind']]}."
    done = sum(of.is_complete for of in runs.values())
    cut = [tag("p", tag("strong", "Cut short"), f": {done} of {wanted} runs are complete.")] if done < wanted else []
    picture = lines({k: v for k, v in series.items() if v}, x="L0", y="FVU", log=True, description="FVU against L0")
    note = "Fraction of variance unexplained against active latents a token. Lower and further left is better."
    rows = zip(runs, frontier(runs), strict=True)
    linked = [[tag("a", first, href=f"{name}/{REPORT}"), *rest] for name, (first, *rest) in rows]
    return page(
        f"{run['d_in']} → {run['latents']}, {len(runs)} {'run' if len(runs) == 1 else 'runs'}: {source}",
        tag("p", how),
        *cut,
        section("The frontier", figure(picture, note), table(FRONTIER, linked)),
        command=command,
        packages=("torch", "numpy"),
    )


def frontier(runs: dict[str, Run]) -> list[list[str]]:
    """Return rows of a table: the name of a run, its L0, FVU and the fraction of latents alive."""
    rows = []
    for name, run in runs.items():
        m = run.metrics
        values = (m["l0"], m["fvu"], (m["held_out"] or {}).get("fvu"), 100 * m["alive"])
        shown = name if run.is_complete else f"{name}, cut short"
        rows.append([shown, *("–" if value is None else f"{value:.4g}" for value in values)])
    return rows


def verdict(metrics: dict[str, Any]) -> str:
    """Say in a sentence how good the autoencoder is."""
    is_known = metrics["held_out"] and metrics["held_out"]["explained_variance"] is not None
    of, tokens = (metrics["held_out"], "tokens held out") if is_known else (metrics, "the tokens")
    explained = "an unknown part" if of["explained_variance"] is None else f"{of['explained_variance']:.1%}"
    active = f"{of['l0']:.3g} latents a token explain {explained} of the variance of {tokens}"
    return f"{active}; {metrics['alive']:.1%} of the latents are alive."


def figures(metrics: dict[str, Any]) -> list[list[str]]:
    """Return rows of a table: what a figure is, its value for all tokens, and for those held out."""
    rows = []
    for name, what in FIGURES.items():
        values = [of.get(name) for of in (metrics, metrics["held_out"] or {})]
        rows.append([what, *("–" if value is None else f"{value:.4g}" for value in values)])
    return rows


def _densities(metrics: dict[str, Any]) -> list[Html]:
    edges, counts = metrics["density_histogram"]["log10_edges"], metrics["density_histogram"]["latents"]
    known = [i for i, count in enumerate(counts) if count]
    if not known:
        return [tag("p", "No latent was active.")]
    rows = [
        [f"{10**low:.1e} to {10**high:.1e}", meter(count, max(counts), is_marked=True), str(count)]
        for low, high, count in list(zip(edges, edges[1:], counts, strict=False))[known[0] : known[-1] + 1]
    ]
    caption = f"Latents by the share of tokens they are active for; {metrics['dead']} never are."
    return [table(["share of tokens", "", "latents"], rows), dim(caption)]


def _curves(curve: list[Point]) -> list[Html]:
    if not curve:
        return [tag("p", "It was not begun.")]
    unexplained = {"FVU of the batch": [(p.step, p.fvu) for p in curve]}
    dead = {"dead latents": [(p.step, p.dead) for p in curve]}
    caption = "Latents that had not been active for a while; the auxiliary loss trains them."
    return [
        figure(lines(unexplained, y="FVU", log=True, description="FVU during training")),
        figure(lines(dead, y="latents", description="dead latents during training"), caption),
    ]
