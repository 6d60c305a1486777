"""From "31: Flattened ragged batches" to the heading it means: `chapters/31-engine-v2.md#flattened-ragged-batches`."""

from pathlib import Path

from engine.exercises.catalog import ROOT, anchor


def chapter_file(chapter: int) -> Path | None:
    return next(iter(sorted((ROOT / "chapters").glob(f"{chapter:02d}-*.md"))), None)


def split(see: str) -> tuple[int, str]:
    chapter, colon, section = see.partition(":")
    if not colon or not chapter.strip().isdigit() or not section.strip():
        raise ValueError(f'see={see!r} must read "31: Section title"')
    return int(chapter), section.strip()


def link(chapter: int, section: str) -> str:
    """File and anchor while the chapter's text is in this tree, otherwise its number and the title."""
    path = chapter_file(chapter)
    if path is None:
        return f'chapter {chapter}, "{section}"'
    return f"{path.relative_to(ROOT).as_posix()}#{anchor(section)}"
