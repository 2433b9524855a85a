"""One process of a distributed test: runs named cases and writes what came of each."""

import json
import sys
import traceback
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist


def main(rank: int, world: int, folder: Path, seconds: float, module: str, names: list[str]) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error", UserWarning)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=seconds),
    )
    cases = __import__(module)
    results = {}
    for name in names:
        try:
            getattr(cases, name)()
            results[name] = "passed"
        except Exception:
            results[name] = traceback.format_exc()
        (folder / f"{rank}.json").write_text(json.dumps(results))
        flag = torch.tensor([results[name] == "passed"], dtype=torch.float64)
        dist.all_reduce(flag)  # after a failure the processes may not be in step
        if flag.item() < world:
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), float(sys.argv[4]), sys.argv[5], sys.argv[6:])
