"""The genres a sample can have, and the names by which files and folders call them."""

from __future__ import annotations

UNKNOWN = "unknown"
GENRES = (
    "fantasy",
    "xianxia",
    "wuxia",
    "romance",
    "urban",
    "scifi",
    "historical",
    "military",
    "mystery",
    "horror",
    "game",
    "comedy",
    "classic",
    UNKNOWN,
)

_ALIASES = {
    "fantasy": "玄幻 奇幻 魔幻 玄幻魔法 玄幻奇幻 东方玄幻 異世界 异世界 high-fantasy",
    "xianxia": "仙侠 仙俠 修真 修仙 仙侠修真 武侠修真 古典仙侠 cultivation",
    "wuxia": "武侠 武俠 武侠仙侠 传统武侠 martial-arts",
    "romance": "言情 爱情 愛情 古言 现言 古代言情 现代言情 现代都市言情 浪漫青春 青春 love",
    "urban": "都市 都市言情 都市生活 现代 現代 现实 city modern",
    "scifi": "科幻 科幻小说 科幻灵异 末世 sci-fi science-fiction sf",
    "historical": "历史 歷史 历史军事 架空历史 穿越 宫斗 history historical-fiction",
    "military": "军事 軍事 战争 戰爭 war",
    "mystery": "悬疑 懸疑 推理 侦探 偵探 悬疑推理 侦探推理 悬疑灵异 detective crime thriller",
    "horror": "恐怖 惊悚 驚悚 灵异 靈異 恐怖灵异 supernatural",
    "game": "游戏 遊戲 网游 網遊 网游竞技 游戏竞技 电竞 體育 体育 litrpg gaming",
    "comedy": "喜剧 喜劇 搞笑 轻松 幽默 humor humour humorous",
    "classic": "古典 名著 古典名著 经典 經典 古典文学 classics classical literature",
    UNKNOWN: "未知 其他 其它 other",
}


def _normal(name: str) -> str:
    """Case, spaces, hyphens and a closing 小说 (novel) make no difference."""
    return name.strip().casefold().removesuffix("小说").removesuffix("小說").replace(" ", "-").replace("_", "-")


_GENRE_OF = {_normal(name): genre for genre, aliases in _ALIASES.items() for name in (genre, *aliases.split())}


def recognise(name: str) -> str | None:
    """The genre that `name` means, by its own name or an alias in any case; None if it means none."""
    return _GENRE_OF.get(_normal(name))
