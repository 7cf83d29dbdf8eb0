"""What `edgespec quantize` made or compared, as tables."""

from __future__ import annotations

from typing import Any

from edgespec.cli.render import paragraph, size_text, table


def report_text(report: dict[str, Any]) -> str:
    """What a mode of `quantize` found, as tables."""
    if "rows" in report:
        return _tuned_text(report) if "max_kl" in report else _compared_text(report)
    if "kv_rows" in report:
        return _kv_text(report)
    rows = [
        ("type", report["type"]),
        ("size", f"{size_text(report['target_bytes'])} of {size_text(report['source_bytes'])}"),
    ]
    if "tensor_types" in report:
        counts: dict[str, int] = {}
        for kind in report["tensor_types"].values():
            counts[kind] = counts.get(kind, 0) + 1
        rows += [
            ("tensors", ", ".join(f"{n} in {kind}" for kind, n in sorted(counts.items()))),
            (
                "divergence",
                f"{report['kl_on_search_texts']:.4f} from the source on the texts of the search, "
                f"{report['kl_of_start']:.4f} before it",
            ),
            ("measured", f"{report['evaluations']} mixtures in {report['measuring_s']:.0f} s"),
        ]
    return table(rows)


def _speed_cells(row: dict[str, Any]) -> list[str]:
    from edgespec.memory.report.page import ms_of

    times = map(ms_of, (row["step_ms"].get(str(n)) for n in (1, 4, 8)))
    speeds = (f"{row[f'{key}_tokens_per_s']:.1f}" for key in ("plain", "speculative"))
    return [*times, *speeds]


def _tuned_text(report: dict[str, Any]) -> str:
    head = ["type", "size", "t(1)", "t(4)", "t(8)", "plain t/s", "speculative t/s", "KL"]
    rows = [head]
    for row in report["rows"]:
        name = f"{row['type']} (source)" if row["is_source"] else row["type"]
        loss = f"{row['kl']:.4f}" if "kl" in row else ""
        mark = " <- chosen" if row["type"] == report["type"] and not row["is_source"] else ""
        rows.append([name, size_text(row["bytes"]), *_speed_cells(row), loss + mark])
    chosen = next(row for row in report["rows"][1:] if "measured" in row)
    source, now = report["rows"][0]["measured"], chosen["measured"]
    end = (
        f"{chosen['type']}: {now['plain_tokens_per_s']:.1f} tokens/s plain as written, "
        f"{chosen['plain_tokens_per_s']:.1f} predicted, "
        f"{now['plain_tokens_per_s'] / source['plain_tokens_per_s']:.2f}x of the source; "
        f"at most {report['max_kl']:.4f} of loss was allowed"
    )
    return f"{table(rows)}\n\n{paragraph(end)}"


def _compared_text(report: dict[str, Any]) -> str:
    head = ["file", "size", "KL [95%]", "agreement", "perplexity", "t(1)", "t(4)", "t(8)"]
    head += ["plain t/s", "speculative t/s"]
    rows = [head]
    for row in report["rows"]:
        cells = [row["file"], size_text(row["bytes"]), *_loss_cells(row.get("quality"))]
        cells += _speed_cells(row)
        rows.append(cells)
    end = (
        f"{report['places']} places of {report['texts']} texts; all but the likeliest "
        f"{report['tokens_kept']} tokens are taken together, "
        f"{report['mass_taken_together']:.2%} of the probability"
    )
    return f"{table(rows)}\n\n{paragraph(end)}"


def _kv_text(report: dict[str, Any]) -> str:
    rows = [["KV cache", "KL", "agreement", "perplexity", "t(1)", "t(4)", "t(8)"]]
    for row in report["kv_rows"]:
        times = (f"{row['step_ms'][n]:.2f} ms" for n in ("1", "4", "8"))
        cells = _loss_cells(row.get("quality"))
        cells[0] = cells[0].partition(" [")[0]  # of one text, which has no interval
        rows.append([row["kv_type"], *cells, *times])
    end = (
        f"losses over {report['places']} tokens of one text, against f16; "
        f"steps after {report['step_depth']} tokens; names are of keys/values where these differ"
    )
    return f"{table(rows)}\n\n{paragraph(end)}"


def _loss_cells(quality: dict[str, Any] | None) -> list[str]:
    if quality is None:
        return ["source", "", ""]
    kl = quality["kl"]
    return [
        f"{kl['value']:.4f} [{kl['low']:.4f}, {kl['high']:.4f}]",
        f"{quality['agreement']['value']:.1%}",
        f"{quality['perplexity_ratio']['value']:.3f}x",
    ]
