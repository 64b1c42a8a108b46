"""Chinese prose for the tests."""

from __future__ import annotations

SIMPLIFIED = (
    "那天晚上，他独自坐在窗边，听着外面的雨声，心里想着过去的事情。她说：“你还记得我们第一次见面的时候吗？”"
    "他点了点头，没有说话。第二天早上，太阳从山后面出来了，村子里的人都知道这件事，大家一起走到河边去看。"
)
TRADITIONAL = (
    "那天晚上，他獨自坐在窗邊，聽著外面的雨聲，心裡想著過去的事情。她說：「你還記得我們第一次見面的時候嗎？」"
    "他點了點頭，沒有說話。第二天早上，太陽從山後面出來了，村子裡的人都知道這件事，大家一起走到河邊去看。"
)


def novel(chapters: int, paragraphs: int = 6, text: str = SIMPLIFIED) -> str:
    """A novel with numbered headings, every paragraph different."""
    parts = []
    for chapter in range(1, chapters + 1):
        parts.append(f"第{chapter}章 雨夜之{chapter}")
        parts += [f"这是第{chapter}天的第{number}件事。{text}" for number in range(1, paragraphs + 1)]
    return "\n\n".join(parts)
