"""The TileLang forms of sparse attention: how they are chosen, that they lower, that they are right on a Hopper GPU.

Without TileLang or without a Hopper GPU the tests that need them are skipped and say so; the choice of the form is
tested everywhere. On the GPU the oracle is float64 over the selected rows, one query at a time.
"""

import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from inference import kernel, kernel_fast
from inference.kernel import sparse_attn
from reference import benchmark

ROOT = Path(__file__).parent.parent
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
needs_tilelang = pytest.mark.skipif(not kernel.tilelang_installed(), reason="the package tilelang is not installed")
needs_hopper = pytest.mark.skipif(not (HOPPER and kernel.tilelang_installed()),
                                  reason="needs a GPU of compute capability 9.0 and the package tilelang")
# BF16 probabilities and output: about 2e-3, with partial outputs in BF16 (split > 1) 2.7e-3; 1e-2 is the promise.
BOUND = 4e-3


def inputs(batch=1, queries=3, heads=4, rows=50, count=20, width=64, absent=0.1, device="cpu", dtype=torch.bfloat16):
    q = torch.randn(batch, queries, heads, width, device=device).to(dtype)
    kv = torch.randn(batch, rows, width, device=device).to(dtype)
    sink = torch.randn(heads, device=device)
    indices = torch.randint(rows, (batch, queries, count), device=device)
    return q, kv, sink, indices.masked_fill(torch.rand(indices.shape, device=device) < absent, -1)


# --- which form -------------------------------------------------------------------------------------------------------


def test_cpu_takes_the_torch_form(monkeypatch):
    monkeypatch.delenv("KERNEL", raising=False)
    tensors = inputs()
    assert torch.equal(sparse_attn(*tensors, 0.1), sparse_attn(*tensors, 0.1, backend="torch"))


def test_environment_names_the_form_and_the_argument_wins(monkeypatch):
    monkeypatch.setenv("KERNEL", "tilelang")
    with pytest.raises(ValueError, match="the tensors are on cpu"):
        sparse_attn(*inputs(), 0.1)
    sparse_attn(*inputs(), 0.1, backend="torch")
    monkeypatch.setenv("KERNEL", "torch")
    sparse_attn(*inputs(), 0.1)
    monkeypatch.setenv("KERNEL", "cuda")
    with pytest.raises(ValueError, match="wanted one of auto, torch, tilelang, tilelang-simple, got 'cuda'"):
        sparse_attn(*inputs(), 0.1)


def on_hopper(monkeypatch, installed):
    """Pretend that nothing but TileLang can stand in the way."""
    monkeypatch.delenv("KERNEL", raising=False)
    monkeypatch.setattr(kernel, "_obstacle", lambda q, kv, sink, indices: None)
    monkeypatch.setattr(kernel, "tilelang_installed", lambda: installed)
    kernel._warn_once.cache_clear()


def test_missing_tilelang_warns_once_and_runs_the_torch_form(monkeypatch):
    on_hopper(monkeypatch, installed=False)
    tensors = inputs()
    with pytest.warns(RuntimeWarning, match="TileLang is not installed"):
        out = sparse_attn(*tensors, 0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(sparse_attn(*tensors, 0.1), out)
    with pytest.raises(ValueError, match="TileLang is not installed"):
        sparse_attn(*tensors, 0.1, backend="tilelang")
    kernel._warn_once.cache_clear()


@pytest.mark.parametrize(("width", "backend", "wanted"), [
    (512, "auto", "fast"), (512, "tilelang", "fast"), (512, "tilelang-simple", "simple"), (64, "auto", "simple")])
def test_width_decides_between_the_fast_and_the_simple_form(monkeypatch, width, backend, wanted):
    on_hopper(monkeypatch, installed=True)
    monkeypatch.setattr(kernel, "sparse_attn_fast", lambda *tensors: "fast")
    monkeypatch.setattr(kernel, "_sparse_attn_simple", lambda *tensors: "simple")
    assert sparse_attn(*inputs(width=width), 0.1, backend=backend) == wanted


def test_obstacles_are_named():
    q, kv, sink, indices = inputs()
    assert kernel._obstacle(q, kv, sink, indices) == "the tensors are on cpu"


@pytest.mark.parametrize("empty", ["queries", "rows", "count"])
def test_nothing_to_attend_to_is_not_launched(monkeypatch, empty):
    on_hopper(monkeypatch, installed=True)
    q, kv, sink, indices = inputs()
    if empty == "queries":
        q, indices = q[:, :0], indices[:, :0]
    elif empty == "rows":
        kv, indices = kv[:, :0], indices
    else:
        indices = indices[..., :0]
    out = kernel.sparse_attn(q, kv, sink, indices, 1.0, backend="tilelang")
    assert out.shape == q.shape and not out.any()
    with pytest.raises(ValueError, match="wanted one of auto"):
        kernel.sparse_attn(q, kv, sink, indices, 1.0, backend="tile")


def test_import_works_without_tilelang():
    code = ("import sys; sys.modules['tilelang'] = None; import inference.kernel, reference.benchmark; "
            "assert 'tvm' not in sys.modules")
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


def test_split_fills_the_machine_and_leaves_enough_rows():
    choose = kernel_fast.choose_split
    items = (1, 7, 8, 15, 16, 30, 31, 66, 67, 4096)
    assert [choose(one, 640, 132) for one in items] == [10, 10, 8, 8, 4, 4, 2, 2, 1, 1]
    assert [choose(1, count, 132) for count in (1, 63, 64, 128, 256, 512, 513, 2048)] == [1, 1, 2, 4, 8, 8, 10, 10]
    assert choose(8, 640, 66) == 4  # half a machine holds half the clusters


def test_benchmark_forms_agree_with_the_torch_form():
    case = benchmark.Case("small", batch=2, queries=3, rows=90)
    generator = torch.Generator().manual_seed(0)
    tensors = benchmark.make_inputs(case, torch.device("cpu"), generator)[0]
    wanted = benchmark.torch_form(*tensors).double()
    assert float((benchmark.plain_torch(*tensors).double() - wanted).norm() / wanted.norm()) < 1e-2
    for name in ("torch_form", "plain_torch"):
        assert benchmark.checked(name, getattr(benchmark, name), tensors) < 1e-2
    q, kv, sink, indices = tensors
    with pytest.raises(ValueError, match="Checking one row off before timing it"):
        benchmark.checked("one row off", lambda *one: benchmark.torch_form(q, kv, sink, (indices + 1) % 90), tensors)
    no_sink = benchmark.torch_form(q, kv, torch.full_like(sink, float("-inf")), indices).double()
    dense = benchmark.dense_attention(*benchmark.gather(*tensors)).view(q.shape).double()
    assert float((dense - no_sink).norm() / no_sink.norm()) < 1e-2


def test_benchmark_without_a_gpu_is_one_line(capsys):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert benchmark.main(["kernel"]) == 1
    assert "wanted a CUDA device" in capsys.readouterr().err


# --- lowering, no GPU needed ------------------------------------------------------------------------------------------


def lower(program, configs):
    import tilelang
    from tvm.target import Target

    target = Target({"kind": "cuda", "arch": "sm_90a"})
    with target, tilelang.transform.PassContext(config=configs):
        return tilelang.lower(program, target=target).kernel_source


@needs_tilelang
@pytest.mark.parametrize(("split", "index_type"), [(1, "int32"), (8, "int64")])
def test_fast_form_lowers(split, index_type):
    source = lower(kernel_fast.build(split, index_type), kernel_fast.PASS_CONFIGS)
    for wanted in ("wgmma_rs", "wgmma_ss", "fetch_row", "warpgroup_reg_alloc<160>", "cudaGridDependencySynchronize"):
        assert wanted in source, f"{wanted} is missing from the lowered kernel"
    assert ("tma_store_cluster" in source) == (split > 1)
    assert re.search(rf"const {'int' if index_type == 'int32' else 'int64_t'}\*( __restrict__)? indices", source)


@needs_tilelang
def test_simple_form_lowers():
    source = lower(kernel.simple_kernel(64, "int64"), kernel.PASS_CONFIGS)
    assert "wgmma_ss" in source


# --- on a Hopper GPU --------------------------------------------------------------------------------------------------


def oracle(q, kv, sink, indices, scale, picked):
    """float64 outputs of the queries `picked` [(b, s), ...]."""
    outputs = []
    for b, s in picked:
        index = indices[b, s]
        rows = kv[b, index[index >= 0].long()].double()
        logits = torch.cat((q[b, s].double() @ rows.T * scale, sink.double()[:, None]), dim=1)
        outputs.append(logits.softmax(-1)[:, :-1] @ rows)
    return torch.stack(outputs)


def run(form, q, kv, sink, indices, scale):
    if form == "simple":
        return sparse_attn(q, kv, sink, indices, scale, backend="tilelang-simple")
    if form == "auto":
        return sparse_attn(q, kv, sink, indices, scale)
    return kernel_fast.sparse_attn_fast(q, kv, sink, indices, scale, split=int(form))


def assert_close(form, tensors, scale=None, queries=12):
    q, kv, sink, indices = tensors
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    torch.full_like(q, float("nan"))  # most likely the memory of the output: what is not written shows
    out = run(form, *tensors, scale)
    assert torch.equal(out, run(form, *tensors, scale)), "two runs differ"
    every = [(b, s) for b in range(q.shape[0]) for s in range(q.shape[1])]
    picked = every[:: max(1, len(every) // queries)] + every[-1:]
    wanted = oracle(q, kv, sink, indices, scale, picked)
    got = torch.stack([out[b, s] for b, s in picked]).double()
    error = float((got - wanted).norm() / wanted.norm().clamp_min(1e-30))
    assert error < BOUND, f"relative L2 error {error:.2e}"
    return out


FORMS = ("1", "2", "4", "8", "10", "simple", "auto")


@needs_hopper
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("batch", "queries", "heads", "rows", "count"), [
    (1, 1, 64, 1, 1), (1, 1, 64, 100, 63), (1, 2, 64, 100, 64), (2, 1, 64, 700, 65), (3, 2, 64, 5000, 640),
    (64, 1, 64, 300, 640), (1, 150, 64, 4000, 200), (2, 3, 4, 500, 130), (1, 2, 16, 500, 640), (2, 2, 100, 500, 300),
    (1, 1, 64, 9000, 2048), (1, 4096, 64, 3000, 96)])
def test_against_float64(form, batch, queries, heads, rows, count):
    split = int(form) if form.isdigit() else 1
    if split > 1 and batch * queries > 1000:
        queries //= 8  # a cluster per query: a long prompt is not what these are for
    assert_close(form, inputs(batch, queries, heads, rows, count, width=512, device="cuda"))


@needs_hopper
@pytest.mark.parametrize("width", [32, 64, 96, 256])
def test_other_widths(width):
    assert_close("simple", inputs(2, 5, 4, 300, 130, width=width, device="cuda"))
    assert_close("auto", inputs(2, 5, 4, 300, 130, width=width, device="cuda"))


@needs_hopper
@pytest.mark.parametrize("form", FORMS)
def test_rows_that_see_nothing_and_nan_in_row_0(form):
    q, kv, sink, indices = inputs(2, 4, 64, 300, 200, width=512, device="cuda")
    indices = indices.masked_fill(indices == 0, -1)
    kv[:, 0] = float("nan")
    indices[:, 1] = -1
    indices[0, 2, :190] = -1
    out = assert_close(form, (q, kv, sink, indices))
    assert (out[:, 1] == 0).all()
    indices[:, 3] = -1
    sink[:5] = float("-inf")
    out = run(form, q, kv, sink, indices, 512**-0.5)
    assert (out[:, 3] == 0).all() and out.isfinite().all()


@needs_hopper
@pytest.mark.parametrize("form", FORMS)
def test_duplicates_sinks_and_growing_maxima(form):
    q, kv, sink, indices = inputs(1, 3, 64, 300, 200, width=512, device="cuda", absent=0)
    indices[0, 0] = 7  # one row 200 times: its weight is 200 / (200 + sink)
    assert_close(form, (q, kv, sink, indices))
    assert_close(form, (q, kv, sink * 10, indices))
    assert_close(form, (q, kv, torch.full_like(sink, float("-inf")), indices))
    # Logits of +-100 in ascending order: the running maximum moves in every tile.
    q = q * 30
    logits = (q[0, 1, 0].float() @ kv[0].float().T).argsort()
    indices[0, 1] = logits[-200:]
    assert_close(form, (q, kv, sink, indices))


@needs_hopper
def test_int32_indices_and_strided_inputs():
    q, kv, sink, indices = inputs(2, 3, 64, 300, 100, width=512, device="cuda")
    wanted = sparse_attn(q, kv, sink, indices, 512**-0.5)
    assert torch.equal(sparse_attn(q, kv, sink, indices.int(), 512**-0.5), wanted)
    strided_q = q.transpose(1, 2).contiguous().transpose(1, 2)
    strided_kv, strided_indices = kv.repeat(1, 1, 2)[..., :512], indices.repeat(1, 1, 2)[..., :100]
    assert torch.equal(sparse_attn(strided_q, strided_kv, sink, strided_indices, 512**-0.5), wanted)


@needs_hopper
def test_kernel_and_torch_form_agree():
    tensors = inputs(2, 40, 64, 3000, 640, width=512, device="cuda")
    wanted = sparse_attn(*tensors, 512**-0.5, backend="torch").double()
    for backend in ("tilelang", "tilelang-simple"):
        difference = sparse_attn(*tensors, 512**-0.5, backend=backend).double() - wanted
        assert float(difference.norm() / wanted.norm()) < BOUND


@needs_hopper
def test_forced_on_the_wrong_tensors():
    q, kv, sink, indices = inputs(width=512, device="cuda")
    with pytest.raises(ValueError, match="q is torch.float32"):
        sparse_attn(q.float(), kv.float(), sink, indices, 0.1, backend="tilelang")
    assert sparse_attn(q.float(), kv.float(), sink, indices, 0.1).dtype == torch.float32
