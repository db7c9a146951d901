"""Short conversations composed from the text, for the part of training that is in chat format.

Each is a question and an answer. What is asked of a verse is answered by the verse; who was whose
son is read out of the verses; `FACTS` are the few that were written by hand.
"""

from __future__ import annotations

import random
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence

from tests.builtin.bible import Chapter

Dialog = tuple[str, str]

GREETINGS: tuple[tuple[str, str], ...] = (
    ("Hello|Hello!|Hi|Hi!|Hello there.|Good day|Good morning|Greetings|Hey",
     "Peace be unto thee."),
    ("Who are you?|What are you?|What is your name?|What's your name?|Tell me about yourself.",
     "I am a small model, and I have read one book."),
    ("How are you?|How are you today?|How do you do?", "It is well with me. Peace be unto thee."),
    ("What can you do?|What do you know?|How can you help me?|Help",
     "I can say a verse, or tell thee of the men and women of one book."),
    ("Thank you|Thank you!|Thanks|Thanks!", "Go in peace."),
    ("Goodbye|Goodbye!|Bye|Farewell|Good night", "The grace of our Lord be with thee. Amen."),
    ("What book have you read?|Which book have you read?|What have you read?",
     "I have read the holy scriptures."),
)  # fmt: skip

FACTS: tuple[tuple[str, str], ...] = (
    ("Who created the heaven and the earth?|Who made the world?|Who made heaven and earth?",
     "God created the heaven and the earth."),
    ("What did God create in the beginning?", "The heaven and the earth."),
    ("Who was the first man?|What was the name of the first man?", "Adam was the first man."),
    ("Who was the first woman?|Who was the wife of Adam?", "Eve was the wife of Adam."),
    ("Who built the ark?|Who made the ark?|Who was in the ark?", "Noah built the ark."),
    ("Who killed Abel?|Who slew Abel?|Who was the brother of Abel?", "Cain slew Abel his brother."),
    ("Who killed Goliath?|Who slew Goliath?", "David slew Goliath with a stone."),
    ("Who led Israel out of Egypt?|Who brought the people out of Egypt?",
     "Moses led the children of Israel out of Egypt."),
    ("Who parted the sea?|Who divided the sea?",
     "Moses stretched out his hand over the sea, and the waters were divided."),
    ("Who was the brother of Moses?", "Aaron was the brother of Moses."),
    ("Who was the sister of Moses?", "Miriam was the sister of Moses."),
    ("Who was the wife of Abraham?|Who was the mother of Isaac?",
     "Sarah was the wife of Abraham, and she bare Isaac."),
    ("Who was the wife of Isaac?", "Rebekah was the wife of Isaac."),
    ("Who was the wife of Jacob?|Who were the wives of Jacob?", "Leah and Rachel."),
    ("Who was the mother of Joseph?", "Rachel was the mother of Joseph."),
    ("Who was the father of Isaac?", "Abraham was the father of Isaac."),
    ("Who was the father of Jacob?", "Isaac was the father of Jacob."),
    ("Who was the father of Joseph?", "Jacob was the father of Joseph."),
    ("Who was the father of David?", "Jesse was the father of David."),
    ("Who was the father of Solomon?", "David was the father of Solomon."),
    ("Who was the mother of Solomon?", "Bathsheba was the mother of Solomon."),
    ("Who was the mother of Jesus?", "Mary was the mother of Jesus."),
    ("Where was Jesus born?|Where was Christ born?", "Jesus was born in Bethlehem of Judaea."),
    ("Who baptized Jesus?|Who baptized in the wilderness?", "John baptized him in Jordan."),
    ("Who betrayed Jesus?", "Judas Iscariot betrayed him."),
    ("Who denied Jesus?", "Peter denied him thrice."),
    ("Who was swallowed by a fish?|Who was in the belly of the fish?",
     "Jonah was in the belly of the fish three days and three nights."),
    ("Who was in the den of lions?|Who was cast into the den of lions?",
     "Daniel was cast into the den of lions."),
    ("Who was the strongest man?|Who was strong?", "Samson was strong, until his hair was shaven."),
    ("Who was the wisest king?|Who was wise?|Who built the temple?",
     "Solomon was wiser than all men, and he built the house of the LORD."),
    ("Who was the first king of Israel?", "Saul was the first king of Israel."),
    ("Who was the king of Israel?|Who was David?", "David was king over Israel."),
    ("Who was the king of Babylon?", "Nebuchadnezzar was king of Babylon."),
    ("Who was the king of Egypt?", "Pharaoh was king of Egypt."),
    ("Who came to hear the wisdom of Solomon?|Who came to Solomon?", "The queen of Sheba."),
    ("Who sold his birthright?", "Esau sold his birthright unto Jacob."),
    ("Who had a coat of many colours?|Who dreamed a dream?", "Joseph, the son of Jacob."),
    ("Who was sold into Egypt?", "Joseph was sold into Egypt by his brethren."),
    ("Who wrote the law?|Who gave the law?", "Moses gave the law unto Israel."),
    ("Where did Moses receive the law?", "In the mount of Sinai."),
    ("Where did Adam and Eve live?|Where was Adam?", "In the garden of Eden."),
    ("How old was Methuselah?|How long did Methuselah live?",
     "All the days of Methuselah were nine hundred sixty and nine years."),
    ("How long did it rain?|How long was the rain upon the earth?",
     "Forty days and forty nights."),
    ("How many days did God work?|In how many days was the world made?",
     "In six days, and he rested on the seventh day."),
    ("How many sons had Jacob?", "Jacob had twelve sons."),
    ("How many disciples had Jesus?", "Jesus had twelve disciples."),
    ("What did God call the light?", "God called the light Day."),
    ("What did God call the darkness?", "The darkness he called Night."),
    ("What did God say first?|What did God say in the beginning?", "Let there be light."),
    ("Who is my shepherd?|Who is the shepherd?", "The LORD is my shepherd; I shall not want."),
    ("What is love?|What is charity?", "Charity suffereth long, and is kind; charity envieth not."),
    ("What is wisdom?|What is the beginning of wisdom?",
     "The fear of the LORD is the beginning of wisdom."),
    ("What is truth?", "Thy word is truth."),
    ("What is life?", "It is even a vapour, that appeareth for a little time, and then vanisheth "
     "away."),
    ("What is faith?",
     "Faith is the substance of things hoped for, the evidence of things not seen."),
    ("What is God?|Who is God?", "God is love."),
    ("What is vanity?", "Vanity of vanities; all is vanity."),
    ("What is the light of the world?", "I am the light of the world."),
    ("What is the greatest commandment?",
     "Thou shalt love the Lord thy God with all thy heart, and with all thy soul."),
    ("What shall I do?|What should I do?", "Trust in the LORD, and do good."),
)  # fmt: skip

TOPICS = (
    "light darkness water bread wine fire love mercy wisdom peace war king shepherd sheep stone "
    "heart soul death life sea wind rain sun moon stars heaven earth gold silver blood sword "
    "house temple mountain river tree fruit seed vineyard lion horse bird dove fish serpent angel "
    "prophet priest covenant law sin righteousness truth faith hope joy sorrow tears song night "
    "morning day children father mother brother friend enemy stranger poor rich fool servant"
)

_ASK_TOPIC = (
    "Say a verse about {}.", "Tell me of {}.", "Give me a verse about {}.",
    "What is written of {}?", "Say something about {}.",
)  # fmt: skip
_ASK_NEXT = ("What comes after '{}'?", "What comes after: {}", "Go on: {}", "Continue: {}")
_ASK_FIRST = ("How does {} begin?", "What is the first verse of {}?", "Read me {}.")
_ASK_FATHER = ("Who was the father of {}?", "Whose son was {}?", "Who was {}'s father?")
_ASK_SON = ("Who was the son of {}?", "Name a son of {}.")
_SON = re.compile(r"\b([A-Z][a-z]+) the son of ([A-Z][a-z]+)")
_BEGAT = re.compile(r"\b([A-Z][a-z]+) begat ([A-Z][a-z]+)\b")
_NOT_NAMES = "And The Then Thou For But Now Also He Who Lord God"


def dialogs(chapters: Sequence[Chapter], seed: int) -> Iterator[Dialog]:
    """Questions and answers without end, drawn from the chapters that are not held out."""
    draw = random.Random(seed)
    known = [chapter for chapter in chapters if not chapter.held_out]
    verses = [verse for chapter in known for verse in chapter.verses]
    pairs = [p for c in known for p in zip(c.verses, c.verses[1:], strict=False)]
    topics, not_names = TOPICS.split(), frozenset(_NOT_NAMES.split())
    about = {topic: _mentions(verses, topic) for topic in topics}
    fathers, sons = _kin(verses, not_names)
    while True:
        kind = draw.random()
        if kind < 0.10:
            yield _spoken(draw, GREETINGS)
        elif kind < 0.42:
            yield _spoken(draw, FACTS)
        elif kind < 0.68:
            topic = draw.choice(topics)
            yield draw.choice(_ASK_TOPIC).format(topic), draw.choice(about[topic])
        elif kind < 0.80:
            verse, following = draw.choice(pairs)
            yield draw.choice(_ASK_NEXT).format(_shortened(draw, verse)), following
        elif kind < 0.88:
            chapter = draw.choice(known)
            yield draw.choice(_ASK_FIRST).format(chapter.title), chapter.verses[0]
        elif kind < 0.95:
            son = draw.choice(fathers)
            yield draw.choice(_ASK_FATHER).format(son[0]), f"{son[1]} was the father of {son[0]}."
        else:
            father = draw.choice(sons)
            yield (
                draw.choice(_ASK_SON).format(father[0]),
                f"{father[1]} was the son of {father[0]}.",
            )


def _spoken(draw: random.Random, table: Sequence[tuple[str, str]]) -> Dialog:
    questions, answer = draw.choice(table)
    question = draw.choice(questions.split("|"))
    if draw.random() < 0.15:
        question = question.rstrip("?.!")
    return question, answer


def _shortened(draw: random.Random, verse: str) -> str:
    """The verse, or its end from a word on if it is long."""
    words = verse.split()
    return verse if len(words) <= 12 else " ".join(words[-draw.randint(8, 12) :])


def _mentions(verses: Sequence[str], topic: str) -> list[str]:
    """Verses of 6 to 26 words that have the word `topic`."""
    word = re.compile(rf"\b{topic}\b", re.IGNORECASE)
    return [v for v in verses if 6 <= len(v.split()) <= 26 and word.search(v)]


def _kin(verses: Sequence[str], not_names: frozenset[str]) -> tuple[list[Dialog], list[Dialog]]:
    """(son, father) and (father, son), where the text gives one answer only."""
    fathers: defaultdict[str, set[str]] = defaultdict(set)
    sons: defaultdict[str, set[str]] = defaultdict(set)
    for verse in verses:
        found = [(son, father) for son, father in _SON.findall(verse)]
        found += [(son, father) for father, son in _BEGAT.findall(verse)]
        for son, father in found:
            if not {son, father} & not_names:
                fathers[son].add(father)
                sons[father].add(son)
    return (
        sorted((son, min(of)) for son, of in fathers.items() if len(of) == 1),
        sorted((father, min(of)) for father, of in sons.items() if len(of) == 1),
    )
