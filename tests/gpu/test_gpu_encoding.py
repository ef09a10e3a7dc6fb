"""Weights leave a GPU encoded, with the bits of the CPU: by the kernel, and as the files of every published format."""

from types import SimpleNamespace

import pytest
import torch

import mcore_bridge as mb
from mcore_bridge.config.quantization import read_quantization
from mcore_bridge.errors import ExportError
from mcore_bridge.rules.codec import Codec
from mcore_bridge.rules.spec import TensorSpec
from mcore_bridge.weights.manifest import Manifest
from mcore_bridge.weights.plan.boxes import ByteCopy, rows_of
from mcore_bridge.weights.sent import encoding
from mcore_bridge.weights.sent.encode_tables import Blocks, EncodeTables, TileLaunch
from mcore_bridge.weights.sent.encoding import encoded_tensors
from mcore_bridge.weights.source.new_scheme import new_scheme
from mcore_bridge.weights.source.weight_format import WeightFormat
from mcore_bridge.weights.transfer.copier import Buffers
from tests.support import quantized
from tests.support.encode_on_cpu import encoded
from tests.support.gpus import spawn
from tests.support.quantized_cases import CASES, case

pytestmark = pytest.mark.multigpu

FORMATS = {
    "fp8 blocks": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "fp8 blocks, powers": {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"},
    "fp8 rows": {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}
        },
    },
    "int4": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32},
            }
        },
    },
}
SHAPES = [(768, 2048), (2048, 768), (6144, 4096), (576, 7168), (1000, 1408)]


@pytest.mark.parametrize("name", FORMATS)
def test_bits_of_a_gpu_are_those_of_a_cpu(name, monkeypatch):
    torch.manual_seed(0)
    note = FORMATS[name]
    for shape in SHAPES:
        for dtype in (torch.bfloat16, torch.float32):
            weight = torch.randn(shape) * torch.exp2(torch.randint(-20, 4, (shape[0], 1)).float())
            weight[: shape[0] // 4] = 0
            weight[shape[0] // 8 :: 3, ::5] = -0.0
            weight = weight.to(dtype)
            quantization = read_quantization(note)
            scheme = new_scheme([TensorSpec.of("w.weight", weight)], quantization)
            form = WeightFormat({"quantization_config": note}, quantization=quantization)
            expected = dict(encoded_tensors("w.weight", weight, scheme, form))
            for kernel in (True, False):
                with monkeypatch.context() as patched:
                    patched.setattr(encoding, "runs_kernel", lambda device, kernel=kernel: kernel)
                    found = dict(encoded_tensors("w.weight", weight.cuda(), scheme, form))
                assert found.keys() == expected.keys()
                for part, tensor in expected.items():
                    assert torch.equal(tensor.view(torch.uint8), found[part].cpu().view(torch.uint8)), (part, shape)


@pytest.mark.parametrize("skips", [False, True])
def test_codes_go_to_their_places_and_tiles_without_one_are_left_out(skips):
    """Places are the right half of all rows but the first 128. Nobody looks at NaN elsewhere, if that is left out."""
    torch.manual_seed(0)
    values = [torch.randn(shape, dtype=torch.bfloat16) for shape in ((512, 768), (256, 768))]
    values[1][0, 0] = values[1][255, 383] = torch.nan
    shards, places, memory = [], {}, [torch.zeros(value.shape[0] - 128, 384, dtype=torch.uint8) for value in values]
    codec = Codec("fp8", (128, 128))
    for number, value in enumerate(values):
        blocks = Blocks(codec, value.shape, (128, 128), torch.bfloat16, (torch.uint8, (-1,)), torch.float32, False)
        shards.append(SimpleNamespace(blocks=blocks, codes=2 * number, scales=2 * number + 1))
        copy = ByteCopy(0, 128 * 768 + 384, number, 0, len(memory[number]), 384, 1, 768, 1, 384, 1)
        places[2 * number] = rows_of([copy], blocks.row_size)
    device = torch.device("cuda", torch.cuda.current_device())
    held, into = (
        Buffers([values[number // 2].to(device) for number in range(4)]),
        Buffers([m.to(device) for m in memory]),
    )
    launch = TileLaunch(EncodeTables.of(shards, places, skips=skips))
    made = launch.run(held, None, device, into)
    assert made.are_wrong.tolist() == [0, int(not skips)]
    for value, shard, own, (_, scales) in zip(values, shards, into.tensors, launch.tables.views(made), strict=True):
        codes, expected = encoded(shard.blocks, value, None)
        are_placed = torch.from_numpy(shard.blocks.have_places(places[shard.codes]))
        assert torch.equal(own.cpu(), codes.view(torch.uint8)[128:, 384:])
        assert torch.equal(scales.cpu()[are_placed], expected[are_placed])


def test_a_number_that_is_not_finite_raises():
    hf, form, *_ = case("qwen3_moe")
    mb.ParallelDims().initialize(device="cuda")
    models = mb.build_model(hf, dims=mb.ParallelDims(), dtype=torch.bfloat16, device="cuda", load_weights=False)
    names = [name for name, _ in models[0].named_parameters() if "linear_fc" in name]
    for name in (names[0], names[-1]):
        with torch.no_grad():
            for parameter in models[0].parameters():
                parameter.normal_(std=0.02)
            parameter = models[0].get_parameter(name)
            parameter[-1, -1] = float("nan")
        with pytest.raises(ExportError, match="must have finite numbers"):
            mb.to_hf_state_dict(models, quantize=form.note)


def published(rank, world_size, folder, dims, dtype):
    """What differs from the folder: in the untrained model; after a change of numbers; and from this on the CPU."""
    dims.initialize(device="cuda")
    models = mb.build_model(folder, dims=dims, dtype=dtype, device="cuda")
    expected = Manifest.from_folder(folder, digests=True)
    before = expected.differences(mb.manifest(models, quantize="as_published", digests=True))
    with torch.no_grad():
        for chunk in models:
            for parameter in chunk.parameters():
                parameter.view(-1)[-1] += 1
    changed = mb.manifest(models, quantize="as_published", digests=True)
    after, on_cpu = expected.differences(changed), ()
    if world_size == 1:
        for chunk in models:
            chunk.cpu()
        on_cpu = changed.differences(mb.manifest(models, quantize="as_published", digests=True))
    return [*before], [*after], [*on_cpu]


def as_published(results):
    for before, after, on_cpu in results:
        assert before == []
        assert after != []
        assert on_cpu == []


@pytest.mark.parametrize("name", CASES)
def test_a_model_leaves_as_published(name, tmp_path):
    hf, form, dtype, _ = case(name)
    quantized.write(hf, form, tmp_path / "published", dtype=dtype)
    as_published([published(0, 1, str(tmp_path / "published"), mb.ParallelDims(), dtype)])


@pytest.mark.parametrize("name", ["qwen3", "nvfp4", "gpt_oss"])
def test_a_model_on_a_mesh_leaves_as_published(name, tmp_path):
    hf, form, dtype, dims = case(name)
    quantized.write(hf, form, tmp_path / "published", dtype=dtype)
    as_published(spawn(published, tmp_path, dims.smallest_world, str(tmp_path / "published"), dims, dtype))
