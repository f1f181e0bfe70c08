"""`ptrain report`: a picture of what metrics.jsonl holds."""

import json

import pytest
from matplotlib.figure import Figure

from parallel_train.cli.app import run
from parallel_train.metrics.report import draw_report, read_rows


def rows(count, **extra):
    return [
        {"step": i, "loss": 1.0 / i, "grad_norm": 2.0, "lr": 0.1, "samples_seen": 8 * i,
         "samples_per_s": 80.0, **extra}
        for i in range(1, count + 1)
    ]  # fmt: skip


def write(folder, lines):
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_every_number_is_drawn_in_a_panel_of_its_name(tmp_path, monkeypatch):
    found = {}

    def look(figure, target, **_):
        for axes in figure.axes:
            for line in axes.lines:
                found[line.get_label()] = (axes.get_ylabel(), line.get_xydata().tolist())

    monkeypatch.setattr(Figure, "savefig", look)
    lines = rows(3, data_s=0.1, peak_memory_gb=2.0, kl_loss=0.5, mfu=0.3)
    lines[2] |= {"eval_loss": 0.5, "eval_kl_loss": 0.4, "eval_only": 1.0}
    draw_report(write(tmp_path / "run", lines))
    assert found["loss"] == ("loss", [[1, 1.0], [2, 0.5], [3, 1 / 3]])
    assert found["eval_loss"] == ("loss", [[3, 0.5]])
    assert {label: panel for label, (panel, _) in found.items()} == {
        "loss": "loss",
        "eval_loss": "loss",
        "lr": "lr",
        "grad_norm": "grad_norm",
        "samples_per_s": "samples per second",
        "data_s": "seconds waited for data",
        "peak_memory_gb": "peak memory [GB]",
        "mfu": "mfu",
        "kl_loss": "kl_loss",
        "eval_kl_loss": "kl_loss",
        "eval_only": "eval_only",
    }


def test_a_long_run_is_drawn_smooth_and_a_wide_loss_on_a_logarithmic_axis(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, target, **_: figures.append(figure))
    lines = [{**row, "loss": 100.0 if row["step"] % 2 else 1.0} for row in rows(400)]
    draw_report(write(tmp_path / "run", lines))
    loss = figures[0].axes[0]
    assert [line.get_label() for line in loss.lines] == ["loss", "loss (mean)"]
    last = loss.lines[1].get_ydata()[-50:]
    assert 40 < min(last) < max(last) < 60
    assert loss.get_yscale() == "log"


def test_the_picture_is_written_where_asked(tmp_path, capsys):
    folder = write(tmp_path / "run", rows(2))
    assert run(["report", str(folder)]) == 0
    assert (folder / "report.png").read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out.strip() == str(folder / "report.png")
    assert run(["report", str(folder), "--output", str(tmp_path / "a.svg")]) == 0
    assert "<svg" in (tmp_path / "a.svg").read_text()


def test_a_line_cut_short_is_left_out(tmp_path):
    folder = write(tmp_path / "run", rows(2))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')
    assert [row["step"] for row in read_rows(folder)] == [1, 2]


def test_losses_of_zero_or_infinity_are_drawn_too(tmp_path):
    lines = [*rows(1, loss2=0), {**rows(2)[1], "loss": float("inf")}, {**rows(2)[1], "loss": 0.0}]
    assert draw_report(write(tmp_path / "run", lines)).is_file()


@pytest.mark.parametrize(
    ("lines", "output", "message"),
    [
        (None, None, "does not hold a metrics.jsonl"),
        ([], None, "does not hold any rows yet"),
        (rows(1), "a.docx", "cannot be written"),
        (rows(1), "none/a.png", "cannot be written"),
    ],
)
def test_a_run_that_cannot_be_drawn_is_refused(tmp_path, capsys, lines, output, message):
    folder = tmp_path / "run" if lines is None else write(tmp_path / "run", lines)
    flags = ["--output", str(tmp_path / output)] if output else []
    assert run(["report", str(folder), *flags]) == 2
    assert message in capsys.readouterr().err


def test_rows_that_were_damaged_by_hand_are_passed_over(tmp_path):
    folder = write(tmp_path / "run", [*rows(2), {"step": 3}, {**rows(1)[0], "loss": None}])
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b"\xff\xfe\n[1]\n")
    assert [row["step"] for row in read_rows(folder)] == [1, 2, 1]
    assert draw_report(folder).is_file()
