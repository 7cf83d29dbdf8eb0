"""How many plain questions files of one model answer, and how fast they decode plainly.

    python benchmarks/questions.py smollm2-q4_1.gguf smollm2-bf16.gguf

24 questions with short answers; an answer counts as right where the word stands in its first 32
tokens. Greedy, without drafts. Files are asked one after the other, not in turns: speeds say which
is faster by a lot, and no more.
"""

from __future__ import annotations

import argparse
import re

import edgespec

QUESTIONS = {
    "What is the capital of France?": "paris",
    "What is the capital of Italy?": "rome",
    "What is the capital of Japan?": "tokyo",
    "What is the capital of Germany?": "berlin",
    "What is the capital of Spain?": "madrid",
    "What is the capital of England?": "london",
    "What is the capital of Russia?": "moscow",
    "What is the capital of China?": "beijing",
    "What is the largest planet in our solar system?": "jupiter",
    "Which planet is known as the red planet?": "mars",
    "How many days are in a week?": r"\b7\b|seven",
    "How many months are in a year?": r"\b12\b|twelve",
    "What color is the sky on a clear day?": "blue",
    "What is the opposite of hot?": "cold",
    "What do bees make?": "honey",
    "What is the chemical formula of water?": "h2o|h₂o",
    "Who wrote Romeo and Juliet?": "shakespeare",
    "Who painted the Mona Lisa?": "leonardo|da vinci",
    "What is 2 + 2?": r"\b4\b|four",
    "What is the largest ocean on Earth?": "pacific",
    "What is the freezing point of water in degrees Celsius?": r"\b0\b|zero",
    "How many legs does a spider have?": r"\b8\b|eight",
    "What gas do plants absorb from the air?": "carbon dioxide|co2",
    "What is the tallest mountain in the world?": "everest",
}


def asked(path: str, kernels: str) -> tuple[int, float, str]:
    """Right answers, tokens/s, and the first answer."""
    right, tokens, seconds, first = 0, 0, 0.0, ""
    with edgespec.load(path, context_size=512, kernels=kernels, drafter="none") as engine:
        for question, answer in QUESTIONS.items():
            result = engine.generate(question, max_tokens=32)
            first = first or result.text
            right += re.search(answer, result.text.lower()) is not None
            tokens += len(result.token_ids) - 1
            seconds += result.counters.decode_s
    return right, tokens / seconds, " ".join(first.split())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("files", nargs="+")
    parser.add_argument("--kernels", default="auto")
    options = parser.parse_args()
    print("| file | right | tokens/s | What is the capital of France? |\n| --- | --- | --- | --- |")
    for path in options.files:
        right, speed, first = asked(path, options.kernels)
        print(f"| {path} | {right} of {len(QUESTIONS)} | {speed:.0f} | {first[:40]} |", flush=True)


if __name__ == "__main__":
    main()
