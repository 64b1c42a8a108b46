from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_novel.corpus.chapters import find_heading, split_chapters
from hvd_novel.corpus.clean import clean

HEADINGS = """
第一章
第一章 陨落的天才
第一章陨落的天才
第十二章：你是谁？
第5章 快跑！
第００３章　风起
第100章 风起，云涌
第 七 章 归来
第二百三十一节 夜谈
第一回 宴桃园豪杰三结义 斩黄巾英雄首立功
第一一九回  中乡魁宝玉却尘缘　沐皇恩贾家延世泽
第三十八回林潇湘魁夺菊花诗薛蘅芜讽和螃蟹咏——
第十九節 歸來
第三卷 江湖
第壹部
第二集（上）
第一篇 少年
第3话 转学生
卷一 考城隍
卷之二
正文 第一章 雨夜
【第一章】雨夜
## 第一章 雨夜
第一卷 笼中雀 第一章 惊蛰
楔子
序
序章 旧梦
序言
前言
引子：一封信
尾声
尾聲
后记
後記
番外
番外一 小时候
番外篇：婚后
番外之元宵
Chapter 1
chapter 12: The Long Road
CHAPTER IV.
Chapter XIV The Return
Chapter Twenty-One
Part One
BOOK II: WAR
Prologue
EPILOGUE
""".strip().split("\n")

SENTENCES = """
第四回中既将薛家母子在荣府内寄居等事略已表明，此回则暂不能写矣．
第二回合
第二回合他终于赢了
第一部分人已经走了
第三集团军
第一节课
第一节课他就睡着了
第二部队
第一章他写得很好。
第三章、第四章都写得不错
第一章 他写了三年。
第二天
第一次见面
第三者
第一卷轴
第一章完
第一章 完
（第一章完）
序列号
前言少述，且说当下芳官回至怡红院中
后记得他说过
引子弹上膛
番外，他又写了一篇
卷上莲蓬吊搭嘴
卷卷俱是白纸。
Chapter and verse
chapter 3 was the longest he had ever written.
Part of the reason
Part I was reading
Book five people for dinner.
She opened the book.
""".strip().split("\n")


@pytest.mark.parametrize("line", HEADINGS)
def test_headings(line: str) -> None:
    assert find_heading(clean(line).text) is not None


@pytest.mark.parametrize("line", SENTENCES)
def test_sentences_that_begin_like_headings(line: str) -> None:
    assert find_heading(line) is None


def test_a_paragraph_is_no_heading() -> None:
    assert find_heading("第一章 " + "很长的一段话" * 20) is None


def test_headings_stay_in_their_chapters_and_a_preface_belongs_to_the_first() -> None:
    text = "《书名》作者\n\n第一章 甲\n\n正文一。\n\n第二章 乙\n\n正文二。"
    assert split_chapters(text) == ["《书名》作者\n\n第一章 甲\n\n正文一。\n\n", "第二章 乙\n\n正文二。"]


def test_no_headings_make_one_chapter_and_no_text_none() -> None:
    assert split_chapters("只有正文。\n还有一段。") == ["只有正文。\n还有一段。"]
    assert split_chapters("") == []
    assert split_chapters("第一章") == ["第一章"]


def test_a_volume_heading_joins_the_chapter_behind_it() -> None:
    text = "第一卷 江湖\n第一章 甲\n一。\n第二章 乙\n二。\n第二卷 庙堂\n\n第一章 丙\n三。"
    assert split_chapters(text) == [
        "第一卷 江湖\n第一章 甲\n一。\n",
        "第二章 乙\n二。\n",
        "第二卷 庙堂\n\n第一章 丙\n三。",
    ]


def test_a_volume_with_a_text_of_its_own_is_a_chapter() -> None:
    assert len(split_chapters("第一卷 江湖\n卷首语在此。\n第一章 甲\n一。")) == 2


def test_a_table_of_contents_joins_the_first_chapter() -> None:
    contents = "目录\n第一章 甲\n第二章 乙\n第三章 丙\n\n"
    body = "第一章 甲\n一。\n第二章 乙\n二。\n第三章 丙\n三。"
    chapters = split_chapters(contents + body)
    assert len(chapters) == 3
    assert chapters[0] == contents + "第一章 甲\n一。\n"


def test_a_repeated_heading_does_not_begin_a_chapter() -> None:
    text = "第三十八回 林潇湘　薛蘅芜\n\n首页|书库\n\n第三十八回林潇湘薛蘅芜——\n\n话说。\n\n第三十九回 村姥姥\n\n且说。"
    assert len(split_chapters(text)) == 2


def test_a_number_used_twice_for_different_chapters_does() -> None:
    assert len(split_chapters("第五章 甲\n一。\n第五章 乙\n二。")) == 2


@given(st.lists(st.sampled_from([*HEADINGS, *SENTENCES, "", "正文。", "他走了。"])).map("\n".join))
def test_nothing_is_lost(text: str) -> None:
    text = clean(text).text
    chapters = split_chapters(text)
    assert "".join(chapters) == text
    assert all(chapter.strip() for chapter in chapters)
