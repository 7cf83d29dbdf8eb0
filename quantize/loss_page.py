"""The page of a comparison: size against loss and speed, as `edgespec quantize compare` found."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from edgespec.memory.report.page import (
    BLUE,
    MEBIBYTE,
    ORANGE,
    figure_of,
    ms_of,
    page_of,
    section_of,
    size_of,
    table_of,
)

if TYPE_CHECKING:
    from markupsafe import Markup


def render_losses(document: dict[str, Any], name: str) -> str:
    """The page as text; `document` is the one of `compare --json`."""
    rows = document["rows"]
    lead = (
        f"KL divergence from the source over {document['places']} places of {document['texts']} "
        "texts, with 95% intervals."
    )
    sections = [
        section_of("Size against loss", lead, figure_of(_draw_losses, rows[1:])),
        section_of(
            "Size against speed",
            f"Predicted from step times measured here after {document['step_depth']} tokens.",
            figure_of(_draw_speeds, rows),
        ),
        section_of("All numbers", "", _table(document)),
    ]
    return page_of(name, rows[0]["file"], "quantized files", sections)


def _draw_losses(axes: Any, rows: list[dict[str, Any]]) -> None:
    for row in rows:
        kl, size = row["quality"]["kl"], row["bytes"] / MEBIBYTE
        error = [[kl["value"] - kl["low"]], [kl["high"] - kl["value"]]]
        axes.errorbar(size, kl["value"], yerr=error, fmt="o", color=BLUE, capsize=3)
        axes.annotate(row["file"], (size, kl["value"]), (5, 4), textcoords="offset points")
    axes.set_xlabel("MiB")
    axes.set_ylabel("KL divergence, nats")
    axes.margins(0.15)
    axes.set_ylim(bottom=0)


def _draw_speeds(axes: Any, rows: list[dict[str, Any]]) -> None:
    for key, color in (("plain", BLUE), ("speculative", ORANGE)):
        sizes = [row["bytes"] / MEBIBYTE for row in rows]
        speeds = [row[f"{key}_tokens_per_s"] for row in rows]
        axes.plot(sizes, speeds, "o", color=color, label=key)
    for row in rows:
        place = (row["bytes"] / MEBIBYTE, row["plain_tokens_per_s"])
        axes.annotate(row["file"], place, (5, -10), textcoords="offset points")
    axes.set_xlabel("MiB")
    axes.set_ylabel("tokens/s")
    axes.margins(0.15)
    axes.set_ylim(bottom=0)
    axes.legend(loc="lower left")


def _table(document: dict[str, Any]) -> Markup:
    head = ["file", "size", "KL", "agreement", "perplexity", "t(1)", "t(4)", "t(8)"]
    head += ["plain t/s", "speculative t/s"]
    rows = []
    for row in document["rows"]:
        quality = row.get("quality")
        cells = [row["file"], size_of(row["bytes"])]
        cells += ["source", "", ""] if quality is None else _quality_cells(quality)
        cells += [ms_of(row["step_ms"].get(str(n))) for n in (1, 4, 8)]
        cells += [f"{row[f'{key}_tokens_per_s']:.1f}" for key in ("plain", "speculative")]
        rows.append(cells)
    return table_of(head, rows, numbers=len(head) - 1)


def _quality_cells(quality: dict[str, Any]) -> list[str]:
    kl, agreement = quality["kl"], quality["agreement"]
    ratio = quality["perplexity_ratio"]["value"]
    return [
        f"{kl['value']:.4f} [{kl['low']:.4f}, {kl['high']:.4f}]",
        f"{agreement['value']:.1%}",
        f"{quality['perplexity']:.2f} ({ratio:.3f}x)",
    ]
