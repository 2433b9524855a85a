"""Sources of activations other than a file: pairs of two sources, and a language model that reads texts."""

import zlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from .._extras import require
from ._activations import ROWS, Activations, check_activations
from ._texts import Tokens

Rows = np.ndarray[Any, Any]


class Source(Protocol):
    """Say what a `Trainer` asks of its data; `Activations`, `Pairs` and `ModelActivations` have it.

    `tokens` is the number of rows, `d` their length, and `crc` a number that tells these data from others.
    """

    @property
    def tokens(self) -> int: ...
    @property
    def d(self) -> int: ...
    @property
    def crc(self) -> int: ...

    def rows(self, index: Rows | slice, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the chosen rows, (…, d)."""
        ...

    def parts(self) -> Iterator[tuple[int, Tensor]]:
        """Yield all rows in order, a part at a time, each with the number of its first row."""
        ...

    def order(self, rows: Rows, generator: torch.Generator) -> Rows:
        """Return rising row numbers in a random order in which rows are cheap to read."""
        ...

    def spread(self, rows: Rows, most: int) -> Rows:
        """Return at most about `most` of rising row numbers, spread over all."""
        ...


class Pairs:
    """Two aligned sources, row by row, for a transcoder: inputs and targets stand side by side in a row.

    Args:
        inputs: (tokens, d_in).
        targets: (tokens, d_out), of the same tokens.

    Examples:
        >>> x, y = (khot.sae.Activations(np.zeros((10, d), np.float32)) for d in (3, 2))
        >>> khot.sae.Pairs(x, y).rows(slice(4)).shape
        torch.Size([4, 5])
    """

    def __init__(self, inputs: Activations, targets: Activations) -> None:
        if inputs.tokens != targets.tokens:
            raise ValueError(f"`targets` must have as many rows as `inputs`, {inputs.tokens}; got {targets.tokens}.")
        self.inputs, self.targets = inputs, targets
        self.tokens, self.widths = inputs.tokens, [inputs.d, targets.d]
        self.d = sum(self.widths)
        self.order, self.spread = inputs.order, inputs.spread

    @cached_property
    def crc(self) -> int:
        """Return the checksum that `check_activations` computes; assign it to save a second pass."""
        return check_activations(self)

    def rows(self, index: Rows | slice, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the inputs and targets of the chosen rows, (…, d_in + d_out)."""
        return torch.cat([self.inputs.rows(index, dtype), self.targets.rows(index, dtype)], -1)

    def parts(self) -> Iterator[tuple[int, Tensor]]:
        """Yield all rows in order, a part at a time, each with the number of its first row."""
        for start in range(0, self.tokens, ROWS):
            yield start, self.rows(slice(start, start + ROWS))


class _Done(Exception):
    """Nothing after the last hook is needed."""


class ModelActivations:
    """Compute the activations of a language model on texts when they are asked for, with a bounded buffer.

    Texts are computed in shards of fixed texts, so that a row has the same bits whenever it is computed. Rows are
    shuffled among the shards that fit into the buffer, and shards are shuffled in each epoch. So a run's whole state is
    its step: a resumed run computes the shards of its buffer again. Padding is left out.

    Args:
        model: a transformers model, or the folder of one, which is loaded with its tokenizer.
        texts: strings, or sequences of token ids.
        module: the name of a submodule whose output is taken, such as "encoder.layer.3"; its input with ":in" after it.
        target: another such name, for a transcoder: its activations follow those of `module` in each row.
        tokenizer: a transformers tokenizer; not needed for ids or a folder.
        max_length: tokens of a text that are read at most.
        shard: texts that are computed together.
        buffer: rows that are kept at a time, about; more shuffle better.
        skip: ids that are left out, such as those of special tokens.
    """

    def __init__(
        self,
        model: nn.Module | str,
        texts: Sequence[Any],
        *,
        module: str,
        target: str | None = None,
        tokenizer: Any = None,
        max_length: int = 128,
        shard: int = 32,
        buffer: int = 2**17,
        skip: Sequence[int] = (),
    ) -> None:
        if isinstance(model, str):
            transformers = require("transformers", extra="hf")
            tokenizer = tokenizer or transformers.AutoTokenizer.from_pretrained(model, local_files_only=True)
            model = transformers.AutoModel.from_pretrained(model, local_files_only=True)
        self.model: nn.Module = model  # type: ignore[assignment]
        self.points = [module] if target is None else [module, target]
        known = dict(self.model.named_modules())
        for point in self.points:
            if point.removesuffix(":in") not in known:
                near = [name for name in known if name.endswith(point.rpartition(".")[2].removesuffix(":in"))][:3]
                raise ValueError(f"`model` must have a module {point!r}; got none, but {', '.join(near) or 'others'}.")
        if not len(texts):
            raise ValueError("`texts` must have at least one text; got none.")
        self._ids, self._tokenizer = _ids(texts, tokenizer, max_length), tokenizer
        self._pad = int(getattr(tokenizer, "pad_token_id", None) or 0)
        self._kept = [~np.isin(ids, np.asarray(skip, np.int64)) for ids in self._ids]
        counts = np.array([int(kept.sum()) for kept in self._kept])
        firsts = np.arange(0, len(texts), shard)
        self._size = shard
        self._starts = np.concatenate([[0], np.add.reduceat(counts, firsts).cumsum()])
        self._buffer, self._held = buffer, OrderedDict[int, Tensor]()
        self.tokens = int(self._starts[-1])
        if not self.tokens:
            raise ValueError("`texts` must have at least one token that is not in `skip`; got none.")
        self.widths = [part.shape[1] for part in self._compute(int((self._starts[1:] > 0).argmax()))]
        self.d = sum(self.widths)

    @cached_property
    def crc(self) -> int:
        """Return a checksum of the tokens, the names of the modules and the model's parameters."""
        value = zlib.crc32(repr((self.points, self._size, [len(ids) for ids in self._ids])).encode())
        for ids, kept in zip(self._ids, self._kept, strict=True):
            value = zlib.crc32(np.where(kept, ids, -1).tobytes(), value)
        for p in self.model.parameters():
            value = zlib.crc32(p.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes(), value)
        return value

    def rows(self, index: Rows | slice, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the chosen rows, (…, d), of the tokens in the order of the texts."""
        if isinstance(index, slice):
            index = np.arange(self.tokens)[index]
        shards = np.searchsorted(self._starts, index, "right") - 1
        out = torch.empty(len(index), self.d, dtype=dtype)
        for number in np.unique(shards):
            at = np.flatnonzero(shards == number)
            out[at] = self._shard(int(number))[index[at] - self._starts[number]].to(dtype)
        return out

    def row_tokens(self, vocabulary: Sequence[str] | None = None) -> Tokens:
        """Return the token of each row and its text's number, for `features`; the tokenizer knows the vocabulary."""
        if vocabulary is None and self._tokenizer is None:
            raise ValueError("`vocabulary` must be given where there is no `tokenizer`; got None.")
        if vocabulary is None:
            vocabulary = self._tokenizer.convert_ids_to_tokens(range(len(self._tokenizer)))
        numbers = np.repeat(np.arange(len(self._kept)), [int(kept.sum()) for kept in self._kept])
        return Tokens(np.concatenate(self._ids)[np.concatenate(self._kept)], vocabulary, numbers)

    def parts(self) -> Iterator[tuple[int, Tensor]]:
        """Yield all rows in order, a shard at a time, each with the number of its first row."""
        for number, start in enumerate(self._starts[:-1].tolist()):
            yield start, self._shard(number)

    def order(self, rows: Rows, generator: torch.Generator) -> Rows:
        """Shuffle the shards, and the rows of as many shards as fit into the buffer."""
        ends = np.searchsorted(rows, self._starts)
        shuffled, waiting, count = list[Rows](), list[Rows](), 0
        for number in torch.randperm(len(self._starts) - 1, generator=generator).tolist():
            part = rows[ends[number] : ends[number + 1]]
            size = int(self._starts[number + 1] - self._starts[number])  # a shard is kept whole
            if waiting and count + size > self._buffer:
                shuffled.append(_shuffled(np.concatenate(waiting), generator))
                waiting, count = [], 0
            waiting, count = [*waiting, part], count + size
        return np.concatenate([*shuffled, _shuffled(np.concatenate(waiting), generator)])

    def spread(self, rows: Rows, most: int) -> Rows:
        """Take the rows of whole shards, evenly spaced: others need not be computed."""
        step = -(-len(rows) // most)
        if step == 1:
            return rows
        shards = np.searchsorted(self._starts, rows, "right") - 1
        found: Rows = rows[shards % step == 0]
        return found[:: -(-len(found) // most)]

    def _shard(self, number: int) -> Tensor:
        """Return a shard's rows, from the buffer if they are there."""
        if number not in self._held:
            self._held[number] = torch.cat(self._compute(number), 1)
        self._held.move_to_end(number)
        while len(self._held) > 1 and sum(map(len, self._held.values())) > self._buffer + len(self._held[number]):
            self._held.popitem(last=False)
        return self._held[number]

    @torch.no_grad()
    def _compute(self, number: int) -> list[Tensor]:
        """Run the model on a shard up to the last hook; return (tokens, d) for each point."""
        part = slice(number * self._size, (number + 1) * self._size)
        ids, kept = self._ids[part], self._kept[part]
        longest = max(1, max(map(len, ids)))
        batch, mask, wanted = (torch.zeros(len(ids), longest, dtype=torch.int64) for _ in range(3))
        batch.fill_(self._pad)
        for i, (row, keep) in enumerate(zip(ids, kept, strict=True)):
            batch[i, : len(row)], mask[i, : len(row)] = torch.from_numpy(row), 1
            wanted[i, : len(row)] = torch.from_numpy(keep.astype(np.int64))
        found: dict[str, Tensor] = {}

        def keep_output(point: str, hidden: Any) -> None:
            first = hidden[0] if isinstance(hidden, tuple) else hidden
            found[point] = first[wanted.bool().to(first.device)].float().cpu()
            if len(found) == len(set(self.points)):
                raise _Done

        handles, modules = [], dict(self.model.named_modules())
        device, was_training = next(self.model.parameters()).device, self.model.training
        for point in self.points:
            module = modules[point.removesuffix(":in")]
            if point.endswith(":in"):
                hook = module.register_forward_pre_hook(lambda m, args, point=point: keep_output(point, args))
            else:
                hook = module.register_forward_hook(lambda m, args, out, point=point: keep_output(point, out))
            handles.append(hook)
        try:
            self.model.eval()(input_ids=batch.to(device), attention_mask=mask.to(device))
        except _Done:
            pass
        finally:
            self.model.train(was_training)
            for hook in handles:
                hook.remove()
        if len(found) < len(set(self.points)):
            raise ValueError(f"The model must call {', '.join(self.points)}; it called {', '.join(found) or 'none'}.")
        return [found[point] for point in self.points]


def _shuffled(rows: Rows, generator: torch.Generator) -> Rows:
    shuffled: Rows = rows[torch.randperm(len(rows), generator=generator).numpy()]
    return shuffled


def _ids(texts: Sequence[Any], tokenizer: Any, max_length: int) -> list[Rows]:
    if isinstance(texts[0], str):
        if tokenizer is None:
            raise ValueError("`tokenizer` must be given for texts that are strings; got None.")
        found: Mapping[str, Any] = tokenizer(list(texts), truncation=True, max_length=max_length)
        return [np.asarray(ids, np.int64) for ids in found["input_ids"]]
    return [np.asarray(ids, np.int64)[:max_length] for ids in texts]
