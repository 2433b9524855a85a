"""One row on 2, 3 and 4 processes over gloo, with a limit of wall-clock time on every job."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def job(world, module, cases, *, is_fault=False, limit=None):
    seconds, usual = (6.0, 30.0) if is_fault else (60.0, 200.0)
    return {
        "world": world,
        "module": module,
        "cases": cases.split(),
        "seconds": seconds,
        "limit": limit or usual,
        "is_fault": is_fault,
    }


SOLVER = "ends_and_infinities rounds_and_bytes faults_of_values hard_with_ties losses_and_thresholds"
LAYOUTS = "hard_with_ties masks_costs_dims_and_half_precision"
MESH = "placements_of_all_kinds arguments_with_layouts_of_their_own other_functions partial_sums_are_made_whole"
SAMPLES = "the_same_bits_in_every_layout the_first_process_gives_the_seed sample_khot_in_parts_and_of_a_dtensor"
LAWS = "natural_parameters_of_rows_in_parts conditional_poisson_has_its_law"
LAYERS = "warnings_come_once balanced_routes expert_choice_among_all_tokens loads_and_losses_under_ddp gates_under_ddp"
LAYERS += " gates_of_divided_features sparsifiers_under_fsdp"
LAYERS += " sparsifiers_under_ddp budgets_over_fsdp_parameters experts_divided_over_processes"
SAE = "latents_divided autoencoders_under_fsdp"
TRAINING = "weights_of_one_process one_process_differs nobody_goes_on_alone"
RUNS = "a_run_whose_process_is_killed a_run_whose_process_raises a_run_whose_writer_is_killed"
RUNS += " a_run_whose_process_is_killed_before a_run_whose_process_is_killed_after_the_last_step"
FAULTS = "killed_before killed_between_rounds killed_between_forward_and_backward raises_and_ends sleeps"
JOBS = {
    "two": job(2, "solver_cases", f"{SOLVER} family_float32_even derivatives"),
    "two-mesh": job(2, "mesh_cases", f"{MESH} whole_rows_need_no_message errors"),
    **{f"{world} layouts": job(world, "solver_cases", "every_layout laws_of_relaxations") for world in (2, 3, 4)},
    "two-compiled": job(2, "solver_cases", "compiled"),
    "two-mesh-compiled": job(2, "mesh_cases", "compiled_dtensor"),
    "two-controls": job(2, "control_cases", "a_sum_that_leaves_one_process_out a_spread_that_is_only_an_identity"),
    "three": job(
        3,
        "solver_cases",
        "family_float64_empty derivatives hard_with_ties masks_costs_dims_and_half_precision",
    ),
    "three-samples": job(3, "sample_cases", f"{SAMPLES} {LAWS} other_designs_are_refused"),
    "two-samples": job(2, "sample_cases", LAWS),
    "two-layers": job(2, "layer_cases", LAYERS),
    "four": job(4, "solver_cases", "family_float64_uneven rounds_and_bytes"),
    "four-mesh": job(4, "mesh_cases", MESH),
    "four-layers": job(4, "layer_cases", "experts_divided_over_processes"),
    "two-sae": job(
        2,
        "autoencoder_cases",
        f"{SAE} autoencoders_under_ddp without_the_group_gradients_differ samples_have_the_right_size "
        "files_are_those_of_one_process metrics_of_parts",
    ),
    "three-sae": job(3, "autoencoder_cases", f"{SAE} autoencoders_under_ddp"),
    "four-sae": job(4, "autoencoder_cases", "tokens_and_latents_divided"),
    "two-training": job(2, "training_cases", TRAINING),
    "four-training": job(4, "training_cases", "weights_of_one_process resumed_at_other_numbers_of_processes"),
    **{name: job(2, "training_cases", name, is_fault=True, limit=80.0) for name in RUNS.split()},
    "vote": job(2, "fault_cases", "out_of_step_by_one_turn"),
    **{name: job(2, "fault_cases", name, is_fault=True) for name in (*FAULTS.split(), "vote_that_is_not_sent")},
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What every process said of every case, by job."""
    root = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, str(HERE / "launcher.py"), str(root), json.dumps(JOBS)]
    subprocess.run(command, timeout=1200, check=True, capture_output=True, cwd=HERE)
    said = {}
    for name, each in JOBS.items():
        said[name] = []
        for rank in range(each["world"]):
            paths = [root / name / f"{rank}.{end}" for end in ("json", "error")]
            said[name].append(
                {**(json.loads(paths[0].read_text()) if paths[0].exists() else {}),
                 **({"error": paths[1].read_text()} if paths[1].exists() else {})}
            )  # fmt: skip
    return said


ORDINARY = [(name, case) for name, each in JOBS.items() if not each["is_fault"] for case in each["cases"]]


@pytest.mark.parametrize(("name", "case"), ORDINARY, ids=lambda t: t)
def test_case(results, name, case):
    for rank, said in enumerate(results[name]):
        assert said.get(case) == "passed", (
            f"rank {rank}: {said.get(case) or said.get('error') or 'it did not get there'}"
        )


@pytest.mark.parametrize("fault", [*FAULTS.split(), *RUNS.split()])
def test_the_others_see_an_error_in_time(results, fault):
    survivor = results[fault][fault == "a_run_whose_writer_is_killed"]
    assert survivor.get(fault) == "passed", survivor


def test_without_the_vote_processes_part_ways(results):
    said = [each.get("vote_that_is_not_sent") for each in results["vote_that_is_not_sent"]]
    assert said != ["passed", "passed"]
