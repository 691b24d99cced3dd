"""Greetings, and talk about what this service and its demonstration model are."""

from __future__ import annotations

from random import Random

from demo.dialogues.message import Exchange, simple

_TOPICS: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ("Hello", "Hi", "Hey", "Good morning", "Good evening", "Hi there", "Hello there"),
        "Hello! How can I help you?",
    ),
    (
        ("How are you", "How is it going", "How do you do", "Are you well", "How are you today"),
        "I am running well, thank you. What can I do for you?",
    ),
    (
        ("Thanks", "Thank you", "Thank you very much", "Many thanks", "That helped, thanks"),
        "You are welcome!",
    ),
    (("Bye", "Goodbye", "See you later", "That is all", "Good night"), "Goodbye!"),
    (
        ("Who are you", "What are you", "What is your name", "Tell me who you are", "Introduce yourself"),
        "I am the twinspark demo, a tiny language model with the architecture of DeepSeek-V4-Flash.",
    ),
    (
        (
            "What is twinspark",
            "Tell me about twinspark",
            "What does twinspark do",
            "Explain twinspark",
            "What is this service",
        ),
        "twinspark serves DeepSeek-V4-Flash from GGUF files on one or two DGX Spark boxes.",
    ),
    (
        (
            "What can you do",
            "What can this demo do",
            "How can you help me",
            "Which tasks do you know",
            "What are you good at",
        ),
        "I can add numbers, count, copy and reverse words, remember facts, call tools and answer in JSON.",
    ),
    (
        (
            "Which APIs does twinspark have",
            "What APIs are there",
            "How do clients talk to twinspark",
            "Which interfaces does it speak",
        ),
        "Clients can use the OpenAI chat, completions and responses APIs, "
        "the Anthropic messages API, and gRPC.",
    ),
    (
        (
            "How many boxes does it need",
            "Does twinspark need two boxes",
            "Can it run on one box",
            "What hardware does it need",
        ),
        "One DGX Spark is enough. Two can run as replicas or share one sharded model.",
    ),
    (
        ("How large are you", "How big is this model", "How many layers do you have", "What is your size"),
        "I am tiny: nine layers and a file of less than 16 megabytes.",
    ),
    (
        ("How were you trained", "What is your training data", "Where do you come from", "Who trained you"),
        "I was trained on synthetic dialogues that the twinspark project generates itself.",
    ),
    (
        ("Can you think", "Do you reason", "What is thinking mode", "Can you think before you answer"),
        "Yes. In thinking mode I write down my steps first, for example to carry digits.",
    ),
    (
        ("Tell me a joke", "Do you know a joke", "Make me laugh", "Say something funny"),
        "Why did the token cross the window? It was compressed on the other side.",
    ),
    (
        (
            "What is the weather",
            "Will it rain tomorrow",
            "What is the capital of the moon",
            "Who won the game",
            "What should I eat",
        ),
        "I do not know. I am only a small demo model.",
    ),
)
_BEFORE = ("", "", "", "Please: ", "One question: ", "Say, ", "So, ", "Well, ", "Okay. ", "By the way: ")
_AFTER = ("", "", "?", "?", ".", "!", "??", " please", " now", "...")


def smalltalk(rng: Random, thinking: bool) -> Exchange:
    """A greeting or a question about the project."""
    questions, answer = rng.choice(_TOPICS)
    question = rng.choice(questions)
    if rng.random() < 0.3:
        question = question.lower()
    text = rng.choice(_BEFORE) + question + rng.choice(_AFTER)
    return simple(text, text, answer, "I know what to say to this.")
