"""What a run that was stopped and resumed leaves equals what an uninterrupted one leaves."""

# The schedule is told its full length, or a shorter first part would bend another curve.
CURVE = ["--scheduler.decay_steps", 10]


def left(ptrain, run):
    """Names of checkpoints, and the bytes of the last one's weights."""
    folder = ptrain.folder / run / "checkpoints"
    steps = sorted(path.name for path in folder.iterdir() if path.name.isdigit())
    return steps, (folder / steps[-1] / "pretrained_model/model.safetensors").read_bytes()


def test_stopped_between_checkpoints_amid_an_accumulation_that_does_not_divide(
    ptrain, small, same_numbers
):
    flags = [*small, *CURVE, "--batch_size", 2, "--accelerator.gradient_accumulation.steps", 3]
    flags += ["--checkpoint.save_freq", 4]
    ptrain("train", *flags, "--steps", 10, "--output_dir", "whole")
    ptrain("train", *flags, "--steps", 8, "--output_dir", "parts")
    ptrain("resume", "parts", "--steps", 10)
    same_numbers(ptrain.rows("parts"), ptrain.rows("whole"))
    assert left(ptrain, "parts") == left(ptrain, "whole")
    assert left(ptrain, "whole")[0] == ["000004", "000008", "000010"]


def test_without_a_frequency_the_end_alone_is_saved_and_resumed(ptrain, small, same_numbers):
    flags = [*small, *CURVE, "--checkpoint.save_freq", 0]
    ptrain("train", *flags, "--steps", 10, "--output_dir", "whole")
    ptrain("train", *flags, "--steps", 7, "--output_dir", "parts")
    assert left(ptrain, "parts")[0] == ["000007"]
    ptrain("resume", "parts", "--steps", 10)
    same_numbers(ptrain.rows("parts"), ptrain.rows("whole"))
    assert left(ptrain, "parts")[0] == ["000007", "000010"]
    assert left(ptrain, "parts")[1] == left(ptrain, "whole")[1]


def test_two_ranks_stopped_amid_a_later_epoch(ptrain, small, same_numbers):
    """Each rank draws noise of its own: dropout and the VAE are on. With and without workers."""
    flags = [*small, "--scheduler.decay_steps", 20, "--dataset.episodes", 0]
    flags += ["--parallelism.dp_shard", 2, "--nproc_per_node", 2]
    ptrain("train", *flags, "--steps", 20, "--output_dir", "whole")
    rows = ptrain.rows("whole")
    assert rows[12]["samples_seen"] == 13 * 16 > 2 * 100  # amid the third epoch of 100 frames
    for workers in (0, 2):
        run = f"parts-{workers}"
        more = ["--steps", 13, "--output_dir", run, "--dataset.num_workers", workers]
        ptrain("train", *flags, *more)
        assert "(step 13)" in ptrain("resume", run, "--steps", 20, "--nproc_per_node", 2)
        same_numbers(ptrain.rows(run), rows)
        assert left(ptrain, run)[1] == left(ptrain, "whole")[1]
