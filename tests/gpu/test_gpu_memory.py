"""On a CUDA device: kernels against the CPU reference, and the device transports between processes."""

from __future__ import annotations

import multiprocessing
import time
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from weft import native  # noqa: E402
from weft.errors import PeerLost, RegistrationError  # noqa: E402
from weft.gpu import GpuWork  # noqa: E402
from weft.gpu.memory import device_view  # noqa: E402
from weft.runtime.memory import brought, own_memory  # noqa: E402
from weft.transport.registry import is_installed, open_transport  # noqa: E402

pytestmark = pytest.mark.gpu
NUM_BYTES = 1 << 20
SOON_S = 20.0
KINDS = [kind for kind in ("cuda_ipc", "nixl") if is_installed(kind)]


def rows(rng: np.random.Generator, align: int, count: int = 200) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Random rows that do not overlap at the destination: source offset, destination offset, length."""
    slot = NUM_BYTES // count // 16 * 16
    length = rng.integers(1, slot // align + 1, count) * align
    dst = np.arange(count) * slot
    src = rng.integers(0, (NUM_BYTES - slot) // align, count) * align
    return src, rng.permutation(dst), np.minimum(length, slot - slot % align)


@pytest.mark.parametrize("align", [16, 8, 4, 2, 1])
def test_copies_and_digests_equal_the_cpu_reference(align):
    rng = np.random.default_rng(align)
    source = torch.from_numpy(rng.integers(0, 256, NUM_BYTES, dtype=np.uint8)).cuda()
    target = torch.zeros_like(source)
    src, dst, length = rows(rng, align)
    position = rng.integers(0, 1 << 36, len(src)) * align
    columns = [c.astype(np.uint64) for c in (dst + target.data_ptr(), src + source.data_ptr(), position, length)]
    work = GpuWork(0)
    digest = work.copy_digest(*columns)
    expected, host = np.zeros(NUM_BYTES, dtype=np.uint8), source.cpu().numpy()
    total = 0
    for s, d, p, n in zip(src, dst, position, length, strict=True):
        expected[d : d + n] = host[s : s + n]
        total += native.digest_bytes(host[s : s + n], int(p))
    assert np.array_equal(target.cpu().numpy(), expected)
    assert digest == total % (1 << 64)
    assert work.digest(columns[0], columns[2], columns[3]) == digest


def test_bytes_brought_to_a_busy_device_are_what_was_sent():
    sent = np.random.default_rng(0).integers(1, 256, NUM_BYTES, dtype=np.uint8)
    torch.cuda._sleep(1 << 30)  # half a second, on the stream of whoever calls
    found = [brought("cuda:0", sent.ctypes.data, NUM_BYTES) for _ in range(3)]
    torch.cuda.synchronize()  # nothing that was queued may overwrite it
    for memory in found:
        assert np.array_equal(device_view(memory.address, NUM_BYTES, torch.device("cuda:0")).cpu().numpy(), sent)


def test_memory_that_versions_land_in_is_not_pytorchs():
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    memory = own_memory("cuda:0", 1 << 30)
    assert not device_view(memory.address, 1 << 30, torch.device("cuda:0")).any()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == before


def test_memory_that_is_not_there_is_refused_with_both_figures():
    kept = torch.empty(int(torch.cuda.mem_get_info()[0] * 0.6), dtype=torch.uint8, device="cuda")
    num_bytes = kept.numel()
    del kept  # PyTorch keeps it for later: it is given back when it is needed
    own_memory("cuda:0", num_bytes)
    with pytest.raises(MemoryError, match=r"1000000\.000 GB of memory are needed on cuda:0, [0-9.]+ GB are free"):
        own_memory("cuda:0", 10**15)


def _serve(pipe: Any, kind: str) -> None:
    transport = open_transport(kind, "engine 0", writer=0, num_threads=1, device="cuda:0", nixl_devices="")
    memory = transport.allocate(NUM_BYTES)
    _, descriptor = transport.register(memory.address, NUM_BYTES)
    pipe.send((transport.endpoint, descriptor))
    while (request := pipe.recv()) is not None:
        if request == "bytes":
            pipe.send(memory.keep.cpu().numpy().tobytes())
        else:
            transport.wait_arrived(request, NUM_BYTES, writer=3, timeout_s=SOON_S)
            pipe.send(transport.arrived(request, writer=3))
    transport.close()


@pytest.mark.parametrize("kind", KINDS)
def test_versions_arrive_between_processes_and_a_lost_peer_is_noticed(kind):
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, kind), daemon=True)
    process.start()
    assert pipe.poll(120)
    endpoint, descriptor = pipe.recv()
    source = torch.zeros(NUM_BYTES, dtype=torch.uint8, device="cuda")
    columns = [np.array([n], dtype=np.uint64) for n in (source.data_ptr(), descriptor.address, NUM_BYTES)]
    with open_transport(kind, "trainer 3", writer=3, num_threads=1, device="cuda:0", nixl_devices="") as writer:
        writer.register(source.data_ptr(), NUM_BYTES)
        peer = writer.connect(endpoint, [descriptor])
        batch = writer.prepare(peer, *columns, np.array([4096], dtype=np.uint64))
        for version in (1, 2, 3):
            source.copy_(torch.randint(0, 256, (NUM_BYTES,), dtype=torch.uint8, device="cuda"))
            torch.cuda.synchronize()
            written = writer.post(batch, tag=version).wait(SOON_S)
            pipe.send(version)
            assert pipe.recv() == NUM_BYTES
            pipe.send("bytes")
            landed = pipe.recv()
            assert landed == source.cpu().numpy().tobytes()
            assert written.digest == native.digest_bytes(np.frombuffer(landed, dtype=np.uint8), 4096)
        with pytest.raises(RegistrationError):
            writer.prepare(peer, columns[0], columns[1] + np.uint64(8), columns[2])
        process.kill()
        process.join(SOON_S)
        started = time.monotonic()
        with pytest.raises(PeerLost):
            writer.post(batch, tag=9).wait(SOON_S)
        assert time.monotonic() - started < SOON_S
