"""What a model says: greedy tokens of transformers, for each of some HF folders.

python examples/say.py FOLDER [FOLDER ...]
"""

import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

QUESTION = "Why is the sky blue? Answer in one sentence."
NUM_TOKENS = 40


@torch.no_grad()
def answer(folder: str) -> str:
    """The answer to ``QUESTION``."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], tokenize=False, add_generation_prompt=True
    )
    prompt = tokenizer(text, return_tensors="pt").input_ids
    tokens = model.generate(prompt, max_new_tokens=NUM_TOKENS, do_sample=False)
    said: str = tokenizer.decode(tokens[0, prompt.size(1) :], skip_special_tokens=True)
    return said.strip()


def main() -> None:
    """Ask each folder; they must say the same, as they should hold the same weights."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", help="HF folders with their tokenizers")
    answers = {folder: answer(folder) for folder in parser.parse_args().folders}
    for folder, said in answers.items():
        print(f"{folder}: {said!r}")
    if len(set(answers.values())) > 1:
        sys.exit("the folders say different things: expected the same weights in each")


if __name__ == "__main__":
    main()
