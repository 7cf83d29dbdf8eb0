"""What the target's conversations with itself begin with: fixed tokens, tasks and first words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

OPENINGS = (
    "Write a short story about", "Write a poem about", "Write an email to", "Compose a blog post",
    "Write an article about", "Write a news report about", "Write a paragraph about",
    "Write a Python function that", "Write a function in C++", "Fix this code:", "Explain",
    "Explain to a child", "What is", "What is the", "What are", "What was", "Why", "Why is",
    "How do I", "How does", "How many", "How much", "Who was", "Who is the", "Who wrote",
    "When did", "When was the", "Where is", "Where was", "Which", "Can you", "Give me a list of",
    "List", "Compare", "Summarize the following text:", "Summarize:", "Translate into German:",
    "Translate into English:", "Translate to French:", "Translate German to English: Die",
    "Translate German to English: Der", "Translate German to English: Ich",
    "Translate German to English: Wir haben", "Translate from German: Es ist",
    "Translate from Spanish: El", "Translate from French: Le", "Rewrite this sentence:",
    "Given the following context, answer the question. Context:", "Extract all names from:",
    "Solve:", "A train", "A shop sells", "A farmer has", "John has", "Mary buys", "There are",
    "If a man has", "Tom and his sister", "Every day,", "Calculate", "Let", "Find the",
    "Describe", "Imagine you are", "Act as", "Pretend to be", "Tell me", "Discuss", "Analyze",
    "Evaluate the following", "Answer in JSON:", "Design", "Plan a", "Classify", "The", "I",
    "My", "In",
)  # fmt: skip
# Before and after passages; where the end is open, the turn goes on.
PASSAGE_TASKS = (
    ("Summarize: ", ""), ("Summarize the following text in two sentences:\n", ""),
    ("Write a short summary of this article:\n\n", ""), ("", "\n\nSummarize the text above."),
    ("", "\nTL;DR"), ("What is the main idea of this text?\n", ""),
    ("Answer the question from the context.\nContext: ", "\nQuestion:"),
    ("Context:\n", "\n\nUsing only the context, answer:"),
    ("Use these notes to answer the question below.\n\n", "\n\nQ:"),
    ("Read this: ", "\nNow tell me"), ("", "\n\nWhat"), ("", "\n\nWho"), ("", "\n\nWhy"),
    ("Translate into German: ", ""), ("Rewrite this in simple words: ", ""),
    ("Correct the grammar:\n", ""), ("Continue: ", ""), ("List the key points of\n", ""),
    ("Extract all names and dates from the text: ", ""),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Chat:
    """The fixed tokens of a conversation: before the user's words, and between them and the answer.

    `ends` are the tokens that end a turn; `words` are tokens that are whole words; `tasks` stand
    before and after passages, which open turns are asked about.
    """

    before: Sequence[int]
    between: Sequence[int]
    ends: frozenset[int]
    openings: Sequence[Sequence[int]]
    words: Sequence[int] = ()
    tasks: Sequence[tuple[Sequence[int], Sequence[int]]] = ()
