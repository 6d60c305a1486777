"""`run.py list`: the exercises in plain text, so that it works before anything is installed."""

from engine.exercises.catalog import Catalog, LookupFailed


def chapter_number(catalog: Catalog, chapter: str | None) -> int | None:
    """`05` as 5. Raises LookupFailed unless it is the number of a chapter with exercises."""
    if chapter is None:
        return None
    if not chapter.isdecimal():
        raise LookupFailed(f"{chapter!r} is not a chapter number; chapters with exercises: {_numbers(catalog)}")
    catalog.lookup(chapter)
    return int(chapter)


def chapter_numbers(catalog: Catalog, chapters: str) -> list[int]:
    """`24,31` as numbers, in order. Raises LookupFailed for what is no chapter with exercises."""
    return sorted({chapter_number(catalog, word.strip()) for word in chapters.split(",")})


def listing(catalog: Catalog, chapter: str | None = None) -> str:
    """A heading per chapter, a line per exercise: whether it is written, its name, its place, its section."""
    wanted = chapter_number(catalog, chapter)
    lines = []
    for number in [wanted] if wanted is not None else catalog.chapters:
        exercises = catalog.of_chapter(number)
        path = catalog.chapter_file(number)
        text = f"   {path.relative_to(catalog.root).as_posix()}" if path else ""
        lines += [f"Chapter {number}: {sum(ex.written for ex in exercises)} of {len(exercises)} written{text}"]
        names = {ex.name: catalog.short(ex) for ex in exercises}
        wide, far = max(map(len, names.values())), max(len(ex.where) for ex in exercises)
        for ex in exercises:
            mark = "written" if ex.written else "   .   "
            lines.append(f"  {mark}  {names[ex.name]:<{wide}}  {ex.where:<{far}}  {ex.section}")
        lines.append("")
    lines += [f"cannot be read: {line}" for line in catalog.damaged]
    return "\n".join(lines).rstrip() or "no exercises found"


def _numbers(catalog: Catalog) -> str:
    return ", ".join(map(str, catalog.chapters)) or "none"
