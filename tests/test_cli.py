"""The command `echo-kv`, as a user calls it."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.commands import run

import echo
from echo import cli, settings
from echo.demo import decode, text
from echo.demo.figures import working_set
from echo.traces import synthetic

PLAN = ("plan", "--gpu-memory", "20G", "--host-memory", "110G", "--host-tokens", "1000000", "--max-batch", "13")


COMMANDS = [
    ("demo",),
    ("doctor",),
    ("plan",),
    ("profile",),
    ("record", "--out", "trace.npz"),
    ("replay", "glm"),
    ("bench", "decode", "--quick"),
]


@pytest.mark.parametrize("arguments", COMMANDS)
def test_a_device_that_is_not_given_comes_from_the_variable(capsys, monkeypatch, tmp_path, arguments):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ECHO_DEVICE", "gpu")
    status, out, err = run(capsys, *arguments)
    assert status == 1 and "ECHO_DEVICE: 'gpu' given, expected auto, cpu, cuda or cuda:N" in out + err
    monkeypatch.setenv("ECHO_DEVICE", "cuda:99")
    status, out, err = run(capsys, *arguments)
    named = "ECHO_DEVICE" if arguments[0] == "doctor" else "device"
    assert status == 1 and f"{named}: 'cuda:99' given, but this build and machine offer" in out + err


ONE_ROW = [
    ("profile", "--synthetic", "--layers", "1", "--batch", "1", "--length", "64", "--steps", "1"),
    ("profile", "--batch", "1", "--length", "64", "--steps", "1"),
    ("bench", "decode", "--quick", "--requests", "2", "--layers", "1", "--output", "4", "--lengths", "128", "--pools",
     "600", "--steps", "2"),
    ("demo", "--tokens", "200", "--sessions", "1", "--new-tokens", "1"),
]  # fmt: skip


@pytest.mark.parametrize("arguments", ONE_ROW)
def test_the_rows_of_another_model_change_no_command(capsys, monkeypatch, tmp_path, arguments):
    """Who has set ECHO_QUERY_ROWS for a server that speculates can still profile, measure and look at the demo."""
    pytest.importorskip("echo.hf")
    pytest.importorskip("rich")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ECHO_QUERY_ROWS", "64")
    status, _, err = run(capsys, *arguments, "--device", "cpu")
    assert status == 0, err


@pytest.mark.parametrize("arguments", [*COMMANDS, ("policies",), ("predictor",), ("cmake-dir",)])
def test_flags_are_written_out_and_unknown_ones_show_the_commands_usage(capsys, arguments):
    name = " ".join(("echo-kv", *itertools.takewhile(str.isalpha, arguments[:2]))) if arguments[0] == "bench" else None
    for flag in ("--no-such-flag", "--devi=cpu", "--js=figures.json"):
        with pytest.raises(SystemExit):
            cli.main([*arguments, flag])
        err = capsys.readouterr().err
        assert err.startswith(f"usage: {name or f'echo-kv {arguments[0]}'} [-h]") and flag in err


def test_without_a_command_all_are_listed(capsys):
    status, out, err = run(capsys)
    assert status == 2 and not out and all(command[0] in err for command in COMMANDS)


def test_whoever_has_seen_enough_of_the_output_gets_no_complaint():
    process = subprocess.Popen(
        [sys.executable, "-m", "echo.cli", *PLAN], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait() == 1
    process.stderr.close()


def test_whoever_wants_no_output_gets_the_status():
    command = f"{sys.executable} -m echo.cli {' '.join(PLAN)} >&-"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_output_that_a_terminal_cannot_show_ends_nothing():
    program = "import sys; from echo import cli; cli._print_cmake_dir = lambda _: print(chr(0x2588)) or 0; "
    program += "sys.exit(cli.main(['cmake-dir']))"
    for coding, shown in (("latin-1", b"\\u2588\n"), ("utf-8", chr(0x2588).encode() + b"\n")):
        found = subprocess.run(
            [sys.executable, "-c", program], env={**os.environ, "PYTHONIOENCODING": coding}, capture_output=True
        )
        assert (found.returncode, found.stdout, found.stderr) == (0, shown, b"")


def test_bytes_that_are_no_text_are_no_value_of_a_flag(capsys):
    for arguments in (("doctor", "--device=\udcff"), ("plan", "--device=\udcff"), ("plan", "--kernels=\udcff")):
        with pytest.raises(SystemExit):
            cli.main(arguments)
        assert f"argument {arguments[1].split('=')[0]}: " in capsys.readouterr().err


def test_torchs_threads_do_not_spin():
    program = "import os, echo.cli; print(os.environ['OMP_WAIT_POLICY'])"
    unset = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    for given, expected in ((unset, "passive"), ({**unset, "OMP_WAIT_POLICY": "active"}, "active")):
        found = subprocess.run([sys.executable, "-c", program], env=given, capture_output=True, text=True, check=True)
        assert found.stdout.strip() == expected


MISSING = [
    (("profile",), "torch", 'torch is missing; pip install ".[hf]" in the source tree of echo'),
    (("profile", "--synthetic"), "torch", "torch is missing; pip install torch"),
    (("bench", "decode", "--quick"), "torch", "torch is missing; pip install torch"),
    (("record", "--out", "t.npz"), "torch", 'torch is missing; pip install ".[hf]" in the source tree of echo'),
    (("record", "--out", "t.npz"), "transformers", 'transformers is missing; pip install ".[hf]"'),
    (("demo",), "torch", 'torch is missing; pip install ".[demo]" in the source tree of echo'),
    (("demo",), "matplotlib", 'matplotlib is missing; pip install ".[demo]" in the source tree of echo'),
    (("policies", "glm", "--plot", "p.png"), "matplotlib", "plot: matplotlib is missing; pip install matplotlib"),
]


@pytest.mark.parametrize(("arguments", "package", "expected"), MISSING)
def test_packages_that_are_missing_are_named_in_one_line(tmp_path, arguments, package, expected):
    program = f"import sys; sys.modules[{package!r}] = None; from echo import cli; sys.exit(cli.main({arguments!r}))"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    (line,) = done.stderr.splitlines()
    command = " ".join(("echo-kv", *(word for word in arguments[:2] if word in ("bench", "decode", arguments[0]))))
    assert done.returncode == 1 and line.startswith(f"{command}: {expected}")


def test_what_echo_hf_needs_is_told():
    program = "import sys; sys.modules['transformers'] = None; import echo.hf"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError: echo.hf: transformers is missing; ") and 'pip install ".[hf]"' in last


def test_no_file_takes_the_place_of_another(capsys, tmp_path, monkeypatch):
    """Neither of one that is read, nor of one that the same command writes; what is no file may be given twice."""
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    synthetic.generate("glm", steps=4, top_k=8).save("trace.npz")
    Path("text.txt").write_text("a text")
    Path("link").symlink_to("trace.npz")
    for arguments, named in (
        (("policies", "trace.npz", "--json", f"{tmp_path}/trace.npz"), "json: "),
        (("predictor", "glm", "trace.npz", "--json", "link"), "json: "),
        (("replay", "link", "--json", "./trace.npz"), "json: "),
        (("record", "--text", "text.txt", "--out", "text.txt"), "out: 'text.txt' given, which is to be read"),
        (("policies", "glm", "--json", "p.png", "--plot", "./p.png"), "plot: 'p.png' given, which is to be the json"),
        (("profile", "--trace", "f", "--json", "f"), "json: 'f' given, which is to be the trace, too"),
        (("bench", "decode", "--quick", "--json", "p.png", "--plot", "p.png"), "plot: 'p.png' given, which is"),
    ):
        before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
        status, out, err = run(capsys, *arguments)
        assert status == 1 and not out and err.split(": ", 1)[1].startswith(named), err
        assert before == {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert run(capsys, "policies", "trace.npz", "--pools", "1", "--json", "/dev/null")[0] == 0


def test_files_that_fail_and_memory_that_is_missing_are_no_tracebacks(capsys, monkeypatch):
    for error in (OSError(28, "No space left on device"), MemoryError("Unable to allocate 3 TiB")):
        monkeypatch.setattr("echo.cli._print_cmake_dir", lambda _, error=error: (_ for _ in ()).throw(error))
        status, _, err = run(capsys, "cmake-dir")
        assert status == 1 and err.startswith("echo-kv cmake-dir: ") and str(error) in err
    torch = pytest.importorskip("torch")
    with pytest.raises(RuntimeError) as refused:
        torch.empty(1 << 58)
    for error in (refused.value, torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 TiB")):
        monkeypatch.setattr("echo.cli._print_cmake_dir", lambda _, error=error: (_ for _ in ()).throw(error))
        status, _, err = run(capsys, "cmake-dir")
        assert status == 1 and err.startswith(f"echo-kv cmake-dir: there is not enough memory: {error}")
    monkeypatch.setattr("echo.cli._print_cmake_dir", lambda _: (_ for _ in ()).throw(RuntimeError("a mistake")))
    with pytest.raises(RuntimeError, match="a mistake"):
        cli.main(["cmake-dir"])


def test_an_interrupt_is_no_traceback(capsys, monkeypatch):
    monkeypatch.setattr("echo.cli._print_cmake_dir", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
    assert run(capsys, "cmake-dir") == (130, "", "echo-kv cmake-dir: interrupted\n")


def test_a_plan_shows_every_allocation_and_what_fits(capsys):
    status, out, _ = run(capsys, *PLAN, "--max-context", "131072")
    assert status == 0
    for name in ("host_pool", "slots", "index_keys", "slot_of", "scores", "control_block"):
        assert name in out
    assert "40,016 B of host rows, 8,052 B of index keys" in out
    assert "DOES NOT FIT" not in out
    lengths = {line.split()[0]: line.split()[1] for line in out.splitlines() if line.strip()[:1].isdigit()}
    assert lengths["131,072"] == "7" and lengths["16,384"] == "61"


def test_the_largest_pools_of_a_plan_fit_and_nothing_larger_does(capsys):
    _, out, _ = run(capsys, *PLAN)
    line = next(line for line in out.splitlines() if line.startswith("with all other settings"))
    tokens, slots = (int(word.replace(",", "")) for word in line.split() if word[0].isdigit())
    for setting, most, unit in (("--host-tokens", tokens, 64), ("--gpu-slots", slots, 1)):
        assert run(capsys, *PLAN, setting, str(most))[0] == 0
        assert run(capsys, *PLAN, setting, str(most + unit))[0] == 1


def test_a_plan_that_does_not_fit_says_so(capsys):
    status, out, _ = run(capsys, *PLAN, "--host-tokens", "100000000")
    assert status == 1 and "DOES NOT FIT" in out


def test_advice_on_what_is_left_is_for_gpus_with_something_left(capsys):
    for arguments, advised in (
        (PLAN, True),
        ((*PLAN, "--host-tokens", "100000000"), False),
        (("plan", "--device", "cpu", "--host-memory", "110G"), False),
    ):
        assert ("what the GPU has left" in run(capsys, *arguments)[1]) == advised
    assert "1 layer," in run(capsys, *PLAN, "--layers", "1")[1]
    assert "(default -1)" in " ".join(subprocess.run(
        [sys.executable, "-m", "echo.cli", "plan", "--help"], capture_output=True, text=True, check=True
    ).stdout.split())  # fmt: skip


def test_sizes_of_any_model_can_be_given(capsys):
    _, out, _ = run(capsys, *PLAN, "--layers", "10", "--top-k", "100", "--row-format", "bf16_1152")
    assert "10 layers, bf16_1152 rows of 1152 B, top-100" in out
    assert "11,520 B of host rows, 1,320 B of index keys; at least 1,313 slots per layer" in out


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--max-batch", "0"), "max_batch"),
        (("--index-heads", "9"), "index_heads"),
        (("--index-heads", "9223372036854775808"), "index_heads"),
        (("--device", "cpu"), "gpu_memory"),
        (("--gpu-slots", "5"), "gpu_slots"),
    ],
)
def test_nonsense_is_refused_by_name(capsys, arguments, named):
    status, _, err = run(capsys, *PLAN, *arguments)
    assert status == 1 and err.startswith(f"echo-kv plan: {named}: ")


@pytest.mark.parametrize("text", ["1e30G", "0", "-5G", "12Q", "", "20"])
def test_sizes_that_are_none_are_refused(capsys, text):
    with pytest.raises(SystemExit):
        cli.main(["plan", f"--gpu-memory={text}"])
    assert "--gpu-memory" in capsys.readouterr().err


def test_sizes_are_read_and_written():
    assert settings.size("141G") == settings.size("141GiB") == settings.size("141 gb") == 141 << 30
    assert settings.size("1.5T") == 3 << 39 and settings.size("512B") == 512 and settings.size("1048576") == 1 << 20
    assert settings.readable(141 << 30) == "141.0 GiB" and settings.readable(656) == "656 B"


def test_the_doctor_says_what_runs_and_what_is_set_in_vain(capsys, monkeypatch):
    monkeypatch.setenv("ECHO_MAX_BATHC", "4")
    _, out, _ = run(capsys, "doctor")
    assert (
        echo.build_info() in out
        and "ECHO_MAX_BATHC is set, but there is no such setting; did you mean ECHO_MAX_BATCH?" in out
    )
    assert "runs on the CPU: " in out or "runs on the GPU: " in out


@pytest.mark.parametrize("broken", ["raise OSError('libcudart.so.13: no such file')", "import a_part_of_it", ""])
def test_the_doctor_says_which_package_is_broken(tmp_path, broken):
    for package in ("torch", "transformers"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text(broken)
    path = os.pathsep.join((str(tmp_path), *sys.path))
    done = subprocess.run(
        [sys.executable, "-m", "echo.cli", "doctor"], env={**os.environ, "PYTHONPATH": path}, capture_output=True,
        text=True,
    )  # fmt: skip
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("python"))
    assert done.stderr == "" and line.count("cannot be imported (") == 2
    assert all(f"{package} cannot" in line for package in ("torch", "transformers"))


def test_the_doctor_looks_at_each_variable(capsys, monkeypatch):
    for name, value in (("MAX_BATCH", "0"), ("PREFETCH", "maybe"), ("THREADS", "many"), ("GPU_SLOTS", "7")):
        monkeypatch.setenv(f"ECHO_{name}", value)
    monkeypatch.setenv("ECHO_CUDA", "OFF")
    status, out, _ = run(capsys, "doctor")
    problems = [line.split(" given")[0] for line in out.splitlines() if "PROBLEM: ECHO_" in line]
    assert status == 1 and problems == [
        "- PROBLEM: ECHO_MAX_BATCH: 0", "- PROBLEM: ECHO_PREFETCH: 'maybe'", "- PROBLEM: ECHO_THREADS: 'many'",
    ]  # fmt: skip
    assert os.environ["ECHO_PREFETCH"] == "maybe" and "ECHO_CUDA " not in out and "ECHO_GPU_SLOTS" not in out


@pytest.mark.parametrize(("text", "number"), [("cuda:3", 3), ("3", 3), ("cuda", 0), ("auto", 0), ("cpu", 0)])
def test_the_doctor_takes_devices_as_all_commands_do(capsys, monkeypatch, text, number):
    looked_at = []
    real = echo.device_report
    monkeypatch.setattr(echo, "device_report", lambda number: looked_at.append(number) or real(number))
    run(capsys, "doctor", "--device", text)
    assert looked_at == [number]
    status, _, err = run(capsys, "doctor", "--device", "cuda:x")
    assert status == 1 and err.startswith("echo-kv doctor: device: 'cuda:x' given, expected")


def test_the_demo_compares_and_leaves_texts_figures_and_a_picture(capsys, monkeypatch, tmp_path, device):
    essay = (Path(echo.__file__).parent / "data" / "memory.txt").read_text()
    monkeypatch.setattr(text, "_sources", lambda: [essay])  # the package's own change, and with them what is written
    files = {"--json": tmp_path / "demo.json", "--plot": tmp_path / "demo.png"}
    status, out, _ = run(
        capsys, "demo", "--device", device, "--tokens", "600", "--sessions", "3", "--new-tokens", "6",
        *(str(part) for pair in files.items() for part in pair),
    )  # fmt: skip
    assert status == 0 and "equal" in out and "DIFFERENT" not in out
    assert "session 2: " in out and "session 3: " not in out
    figures = json.loads(files["--json"].read_text())
    assert figures["tokens_equal"] and figures["selections_equal"]
    assert figures["sessions"] == 3 and figures["new_tokens"] == 6 and figures["text_tokens"] == 600
    assert len(figures["hit_rate"]) == len(figures["missed_rows"]) == figures["layers"] == 5
    assert all(used <= rows for used, rows in zip(figures["prefetched_used"], figures["prefetched_rows"], strict=True))
    assert "rows missed" in out and "rows prefetched" in out and "of them used" in out
    assert all(0 < rate < 1 for rate in figures["hit_rate"])
    assert figures["pool_slots"]["offloaded"] < figures["pool_slots"]["resident"]
    assert figures["step_ms"]["offloaded"] > 0
    assert figures["openings"] == [text.opening(session) for session in range(3)]
    assert len(figures["generated"]) == 3 and all(figures["generated"])
    assert figures["looked_up"] and "wrote it: yes" in out
    assert files["--plot"].read_bytes().startswith(b"\x89PNG")


def test_the_demo_fails_when_the_runs_differ(capsys, monkeypatch, tmp_path):
    real = decode.Workload.decode

    def wrong(work, kv, slots, label):
        decoded = real(work, kv, slots, label)
        decoded.tokens[-1, 0] += slots < work.all_slots
        return decoded

    monkeypatch.setattr(decode.Workload, "decode", wrong)
    status, out, _ = run(
        capsys, "demo", "--device", "cpu", "--tokens", "300", "--sessions", "1", "--new-tokens", "2",
        "--row-format", "fp32", "--plot", str(tmp_path / "demo.png"),
    )  # fmt: skip
    assert status == 1 and "DIFFERENT" in out


def test_the_demo_refuses_before_it_starts(capsys, tmp_path):
    missing = tmp_path / "missing" / "demo.json"
    for arguments, named in (
        (("--json", str(missing)), "json"),
        (("--plot", "picture.foo"), "plot"),
        (("--sessions", "0"), "sessions"),
        (("--pool", "2"), "pool"),
        (("--tokens", "16384"), "tokens"),
        (("--tokens", "1"), "tokens"),
        (("--new-tokens", "16384"), "new_tokens"),
    ):
        status, _, err = run(capsys, "demo", "--device", "cpu", *arguments)
        assert status == 1 and err.startswith(f"echo-kv demo: {named}: ")


def test_the_demo_reads_a_statement_and_then_whole_files_from_the_end():
    class Letters:
        eos_token_id = 0

        def __call__(self, characters):
            return {"input_ids": [ord(character) for character in characters]}

    def plain(tokens):
        return "".join(map(chr, text.read_text(Letters(), tokens)))

    statement = '\0\nKEY_7f3a = "3fa90c17"\n'
    last = sorted((Path(echo.__file__).parent / "traces").glob("*.py"))[-1].read_text().rstrip("\n")
    everything = plain(50_000)
    assert len(everything) == 50_000
    assert everything.startswith(statement) and everything.endswith(f"\0{last}")
    assert plain(len(statement) + 1) == statement + last[-1]
    for tokens in (-1, 0, len(statement), 100_000_000):
        with pytest.raises(echo.InvalidArgument, match=f"^tokens: {tokens} given, expected {len(statement) + 1} to "):
            plain(tokens)


def test_a_working_set_counts_rows_of_each_session_once():
    selections = np.asarray([[[[0, 1], [0, -1]]], [[[1, 2], [0, 5]]], [[[3, 2], [5, -1]]]], np.int32)
    assert working_set(selections, window=2).tolist() == [[3], [5], [5]]


def test_cmake_dir_is_where_the_package_is(capsys):
    status, out, _ = run(capsys, "cmake-dir")
    assert status == 0 and (Path(out.strip()) / "lib" / "cmake" / "echo" / "echo-config.cmake").is_file()
