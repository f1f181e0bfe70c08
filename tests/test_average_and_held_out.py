"""`--ema.decay` and `--eval.*` through whole runs: on other ranks, resumed, converted."""

import shutil

import pytest
from safetensors.torch import load_file

FLAGS = ["--ema.decay", "0.9", "--eval.fraction", "0.5", "--eval.freq", "4", "--policy.dropout", 0]
FLAGS += ["--policy.use_vae", "false", "--steps", 8, "--checkpoint.save_freq", 4]


def weights(ptrain, run, step="last"):
    return ptrain.folder / run / "checkpoints" / step / "pretrained_model/model.safetensors"


def evaluations(ptrain, run):
    return {r["step"]: r["eval_loss"] for r in ptrain.rows(run) if "eval_loss" in r}


def close(found, wanted, tolerance=2e-5):
    found, wanted = load_file(found), load_file(wanted)
    assert found.keys() == wanted.keys()
    return all((found[n] - wanted[n]).abs().max() < tolerance for n in wanted)


def test_an_average_resumes_to_the_last_bit_and_on_other_ranks(ptrain, small):
    ptrain("train", *small, *FLAGS, "--output_dir", "whole")
    losses = evaluations(ptrain, "whole")
    assert list(losses) == [4, 8]

    shutil.copytree(ptrain.folder / "whole", ptrain.folder / "again", symlinks=True)
    shutil.rmtree(ptrain.folder / "again/checkpoints/000008")
    ptrain("resume", "again/checkpoints/000004")
    assert weights(ptrain, "again", "000008").read_bytes() == weights(ptrain, "whole").read_bytes()
    assert evaluations(ptrain, "again") == losses

    sharded = ["--nproc_per_node", 2, "--parallelism.dp_shard", 2, "--batch_size", 4]
    shutil.rmtree(ptrain.folder / "again/checkpoints/000008")
    ptrain("resume", "again/checkpoints/000004", *sharded, "--checkpoint_format", "dcp")
    assert evaluations(ptrain, "again") == pytest.approx(losses, rel=1e-5)
    ptrain("convert", "again", "--output", "exported")
    assert close(ptrain.folder / "exported/model.safetensors", weights(ptrain, "whole"))


def test_the_average_is_what_is_kept_and_the_weights_are_what_goes_on(ptrain, small, same_numbers):
    plain = [*FLAGS[2:], "--seed", 5]
    ptrain("train", *small, *plain, "--output_dir", "plain")
    ptrain("train", *small, *FLAGS, "--seed", 5, "--output_dir", "averaged")
    # Averaging changes nothing about training, but other weights are kept.
    same_numbers(ptrain.rows("averaged"), ptrain.rows("plain"))
    assert not close(weights(ptrain, "averaged"), weights(ptrain, "plain"))
    more = ["--steps", 9]
    ptrain("resume", "plain", *more)
    text = ptrain("resume", "averaged", *more, "--ema.decay", "None")
    assert "averages are dropped" in text
    same_numbers(ptrain.rows("averaged"), ptrain.rows("plain"))
    assert weights(ptrain, "averaged").read_bytes() == weights(ptrain, "plain").read_bytes()
    text = ptrain("resume", "averaged", "--steps", 10, "--ema.decay", "0.5")
    assert "does not hold averages; they start with the next update" in text


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--eval.episodes", 0], "eval.episodes names [0], which dataset.episodes trains on"),
        (["--eval.episodes", 99], "eval.episodes names [99], but the dataset has 80 episodes"),
        (["--eval.fraction", "0.9"], "eval.fraction holds out 2 of 2 episodes"),
        (["--eval.fraction", "1.5"], "eval.fraction = 1.5"),
    ],
)
def test_a_split_that_cannot_be(ptrain, small, flags, message):
    text = ptrain("train", *small, *flags, code=2)
    assert message in text.replace("\n", " ")


@pytest.mark.parametrize("form", ["safetensors", "dcp"])
def test_a_sharded_run_saves_right_after_an_evaluation(ptrain, small, form):
    """The root was left gathered by the evaluation, and its shards were not found."""
    sharded = ["--nproc_per_node", 2, "--parallelism.dp_shard", 2, "--batch_size", 4]
    sharded += ["--checkpoint_format", form, "--steps", 3, "--checkpoint.save_freq", 2]
    text = ptrain("train", *small, *sharded, "--output_dir", "run", "--eval.fraction", "0.5")
    assert "on fsdp, " in text
    ptrain("train", *small, *sharded, "--output_dir", "other", "--eval.fraction", "0.5",
           "--eval.freq", 1)  # fmt: skip
    for name in ("run", "other"):
        assert ptrain.rows(name)[-1]["step"] == 3
        ptrain("verify", name)
    # Evaluating leaves no trace in training.
    for a, b in zip(ptrain.rows("run"), ptrain.rows("other"), strict=True):
        assert (a["loss"], a["grad_norm"]) == (b["loss"], b["grad_norm"])


def test_the_held_out_loss_of_act_does_not_depend_on_the_ranks(ptrain, small):
    still = ["--steps", 1, "--optimizer.lr", "1e-12", "--optimizer.weight_decay", 0]
    held_out = ["--eval.episodes", 2, "--eval.max_samples", 13]
    ptrain("train", *small, *still, *held_out, "--output_dir", "one")
    ptrain("train", *small, *still, *held_out, "--output_dir", "two", "--nproc_per_node", 2)
    one, two = (ptrain.rows(run)[-1]["eval_loss"] for run in ("one", "two"))
    assert one == pytest.approx(two, rel=1e-5)
