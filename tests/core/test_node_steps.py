"""What a rented machine does before the engine."""

from dataclasses import replace

from kimisession.core.node_steps import ENGINE_PYTHON, disk_check, engine_python, setup_steps, weights_step
from kimisession.profile_file import load_profile


def test_driver_gib_and_stack_run_side_by_side_and_the_preflight_waits_for_all_three() -> None:
    steps = {step.name: step for step in setup_steps(load_profile("kimi-k2.5"), "gcp", 8, ENGINE_PYTHON)}
    assert list(steps) == ["disk", "driver", "gib", "stack", "preflight"]
    assert all(not steps[name].after for name in ("disk", "driver", "gib", "stack"))
    assert steps["preflight"].after == ("driver", "gib", "stack")
    assert steps["stack"].argv[1:3] == ("--lock", "vllm-0.15.0")


def test_a_python_of_ones_own_is_not_installed_over() -> None:
    steps = setup_steps(load_profile("kimi-k2.5"), "gcp", 8, "/opt/mine/bin/python")
    assert [step.name for step in steps] == ["disk", "driver", "gib", "preflight"]
    assert "/opt/mine/bin/python" in steps[-1].argv


def test_a_machine_that_is_not_ours_to_set_up_is_left_as_it_is() -> None:
    for infra in ("slurm", "kubernetes", "local"):
        assert setup_steps(load_profile("kimi-k2.5"), infra, 8, "python3") == ()
        assert engine_python(infra) == "python3"


def test_the_weights_wait_for_the_local_disks_and_for_nothing_else() -> None:
    setup = setup_steps(load_profile("kimi-k2.5"), "gcp", 8, ENGINE_PYTHON)
    step = weights_step(("pull",), setup)
    assert (step.argv, step.after) == (("pull", "--spread"), ("disk",))
    assert weights_step(("pull",), ()).after == (), "where nothing is set up they go where they are told to"


def test_the_weights_wait_for_a_look_at_the_disk_that_they_will_lie_on() -> None:
    setup = setup_steps(load_profile("kimi-k2.5"), "gcp", 8, ENGINE_PYTHON)
    check = disk_check(595_147_639_776, 2700, setup)
    assert (check.after, check.argv[-3:]) == (("disk",), ("--min-disk-mb-per-s", "220.4", "--spread"))
    assert weights_step(("pull",), (*setup, check)).after == ("disk-speed",)
    # On Slurm, where the site brings the software, it is the whole set-up.
    alone = disk_check(595_147_639_776, 2700, ())
    assert (alone.after, alone.argv[-2:]) == ((), ("--min-disk-mb-per-s", "220.4"))
    assert weights_step(("pull",), (alone,)).after == ("disk-speed",)


def test_a_machine_that_keeps_no_copy_of_the_weights_mounts_nothing() -> None:
    profile = replace(load_profile("kimi-k2.5"), load="in-place")
    assert "disk" not in [step.name for step in setup_steps(profile, "gcp", 8, ENGINE_PYTHON)]
