# SPDX-License-Identifier: Apache-2.0
"""Reading `nvidia-smi topo -m` (links) and `nvidia-smi topo -p2p r` (peer access).

The output is meant for eyes: columns drift, the header may be coloured or one tab off, NIC columns
come and go, affinity cells may be blank, and pasted files lose tabs. So only what the header
announces is read, everything read is checked, and what does not add up is refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from . import cpulist, links
from .errors import TopologyError

_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
_GPU = re.compile(r"GPU(\d+)")
_FUSED = re.compile(r"(NIC|GPU|mlx).*(NIC|GPU|mlx)")
_AFFINITY_COLUMNS = ("CPU Affinity", "NUMA Affinity", "GPU NUMA ID")
# What `topo -p2p` prints instead of links.
PEER_STATUS = {
    "OK": "peer access works",
    "CNS": "chipset not supported",
    "GNS": "GPU not supported",
    "TNS": "topology not supported",
    "NS": "not supported",
    "DR": "disabled by a registry key",
    "U": "unknown",
}
_TAKE_AGAIN = "take it again with `nvidia-smi topo -m > FILE`"


@dataclass(frozen=True)
class Matrix:
    """GPU-to-GPU links and each GPU's place, as `nvidia-smi topo -m` tells them.

    Attributes:
        links: links[i][j], "X" where i == j; symmetric.
        cpus: CPU affinity of each GPU as a Linux list, None where the cell is blank or "N/A".
        numa: NUMA nodes of each GPU, None where the cell is blank or "N/A".
        warnings: what could not be read, as sentences.
    """

    links: tuple[tuple[str, ...], ...]
    cpus: tuple[str | None, ...]
    numa: tuple[tuple[int, ...] | None, ...]
    warnings: tuple[str, ...] = field(default=())

    @property
    def count(self) -> int:
        return len(self.links)


def single() -> Matrix:
    """The matrix of a host with one GPU, where there is nothing to ask."""
    return Matrix(links=((links.SELF,),), cpus=(None,), numa=(None,))


def parse_matrix(text: str) -> Matrix:
    """Reads the first matrix in the output of `nvidia-smi topo -m`.

    Raises:
        TopologyError: no matrix, a damaged one, or one of `topo -p2p`.
    """
    lines, start = _find_header(text, "topo -m")
    header = lines[start].split()
    count = _count_gpus(header)
    others, columns = _read_header_tail(header[count:])
    rows = _gpu_rows(lines[start + 1 :], count)

    table: list[tuple[str, ...]] = []
    cpus: list[str | None] = []
    numa: list[tuple[int, ...] | None] = []
    warnings: list[str] = []
    for gpu, line in enumerate(rows):
        tokens = line.split()[1:]
        table.append(_gpu_cells(gpu, tokens, count))
        for cell in tokens[count : count + others]:
            if cell != links.SELF and not links.is_link(cell):
                raise TopologyError(
                    f"the matrix is damaged: row GPU{gpu} has {cell!r} where a NIC's link belongs; "
                    f"{_TAKE_AGAIN}"
                )
        affinity = _affinity(line, count + others, columns)
        cpus.append(_checked_list(affinity.get("CPU Affinity"), gpu, "CPU affinity", warnings))
        nodes = _checked_list(affinity.get("NUMA Affinity"), gpu, "NUMA affinity", warnings)
        numa.append(tuple(sorted(cpulist.parse(nodes))) if nodes else None)
    _check_symmetry(table)
    return Matrix(tuple(table), tuple(cpus), tuple(numa), tuple(warnings))


def parse_p2p(text: str) -> tuple[tuple[str, ...], ...]:
    """Reads the first matrix in the output of `nvidia-smi topo -p2p r`: statuses, "X" for itself.

    Raises:
        TopologyError: no matrix, a damaged one, or one of `topo -m`.
    """
    lines, start = _find_header(text, "topo -p2p r")
    header = lines[start].split()
    count = _count_gpus(header)
    table = []
    for gpu, line in enumerate(_gpu_rows(lines[start + 1 :], count)):
        cells = tuple(line.split()[1 : 1 + count])
        if len(cells) < count:
            raise TopologyError(f"the peer access matrix is damaged: row GPU{gpu} is cut short")
        for peer, cell in enumerate(cells):
            if (cell == links.SELF) != (peer == gpu) or (peer != gpu and cell not in PEER_STATUS):
                raise TopologyError(
                    f"GPU{gpu} to GPU{peer} reads {cell!r}, which `nvidia-smi topo -p2p r` "
                    "does not print"
                )
        table.append(cells)
    return tuple(table)


def _is_row(tokens: list[str]) -> bool:
    """A row repeats its label's own "X" or a link or status next; a header repeats labels."""
    return len(tokens) > 1 and (
        tokens[1] in PEER_STATUS or bool(re.match(r"(X|NV\d|PIX|PXB|PHB|NODE|SYS|SOC)", tokens[1]))
    )


def _find_header(text: str, command: str) -> tuple[list[str], int]:
    lines = _ANSI.sub("", text).splitlines()
    for number, line in enumerate(lines):
        tokens = line.split()
        if tokens and tokens[0].startswith("GPU0") and not _is_row(tokens):
            return lines, number
    raise TopologyError(
        f"no header line that starts with GPU0: this is not the output of `nvidia-smi {command}`"
    )


def _count_gpus(header: list[str]) -> int:
    count = 0
    for token in header:
        match = _GPU.fullmatch(token)
        if match is None:
            if token.startswith("GPU") and token != "GPU":
                raise TopologyError(
                    f"the matrix is damaged: header cell {token!r} has lost its tab; {_TAKE_AGAIN}"
                )
            break
        if int(match.group(1)) != count:
            raise TopologyError(
                f"the matrix is damaged: header has {token} where GPU{count} belongs; {_TAKE_AGAIN}"
            )
        count += 1
    return count


def _read_header_tail(tail: list[str]) -> tuple[int, tuple[str, ...]]:
    """Number of NIC columns, and the names of the affinity columns after them."""
    others = 0
    while others < len(tail) and tail[others] not in ("CPU", "NUMA", "GPU"):
        if _FUSED.match(tail[others]):
            raise TopologyError(
                f"the matrix is damaged: header cell {tail[others]!r} has lost its tab, so the "
                f"columns after it cannot be told apart; {_TAKE_AGAIN}"
            )
        others += 1
    rest = " ".join(tail[others:])
    columns = tuple(name for name in _AFFINITY_COLUMNS if name in rest)
    # An unknown column among them would shift the cells: then none is read.
    return others, columns if " ".join(columns) == rest else ()


def _gpu_rows(lines: list[str], count: int) -> list[str]:
    rows: list[str] = []
    for line in lines:
        tokens = line.split()
        if not tokens:
            continue
        match = _GPU.fullmatch(tokens[0])
        if match is None or not _is_row(tokens):
            break  # a NIC's row, the legend, or the header of a second matrix
        if int(match.group(1)) != len(rows) or len(rows) == count:
            raise TopologyError(
                f"the matrix is damaged: row {tokens[0]} stands where "
                f"{f'GPU{len(rows)}' if len(rows) < count else 'no GPU'} belongs; {_TAKE_AGAIN}"
            )
        rows.append(line.strip(" "))
    if len(rows) < count:
        raise TopologyError(
            f"the matrix is damaged: its header names {count} GPUs and {len(rows)} rows follow; "
            f"{_TAKE_AGAIN}"
        )
    return rows


def _gpu_cells(gpu: int, tokens: list[str], count: int) -> tuple[str, ...]:
    cells = ["SYS" if cell == "SOC" else cell for cell in tokens[:count]]  # SOC: driver < 375
    for peer, cell in enumerate(cells):
        if cell in PEER_STATUS:
            raise TopologyError(
                f"this is `nvidia-smi topo -p2p` (GPU{gpu} to GPU{peer} reads {cell}), which tells "
                "nothing of links; give the output of `nvidia-smi topo -m`"
            )
        if (cell == links.SELF) != (peer == gpu) or (peer != gpu and not links.is_link(cell)):
            raise TopologyError(
                f"the matrix is damaged: GPU{gpu} to GPU{peer} reads {cell!r}; {_TAKE_AGAIN}"
            )
    if len(cells) < count:
        raise TopologyError(
            f"the matrix is damaged: row GPU{gpu} has {len(cells)} of {count} cells; {_TAKE_AGAIN}"
        )
    return tuple(cells)


def _affinity(line: str, cells: int, columns: tuple[str, ...]) -> dict[str, str]:
    """The cells after the links, by column name; blank cells may be missing from the result.

    Tabs tell a blank cell from an absent one. `nvidia-smi` writes two tabs before the last column.
    Without tabs a row with fewer cells than columns is ambiguous, and nothing is read from it.
    """
    fields = [part.strip() for part in line.split("\t")]
    if "\t" in line and fields[: cells + 1] == line.split()[: cells + 1]:
        named = dict.fromkeys(columns, "")
        for number, value in enumerate(fields[cells + 1 :][: len(columns[:2])]):
            named[columns[number]] = value
        return named
    tail = line.split()[cells + 1 :]
    if len(tail) != len(columns):
        return {}
    return {name: tail[number] for number, name in enumerate(columns)}


def _checked_list(cell: str | None, gpu: int, what: str, warnings: list[str]) -> str | None:
    if not cell or cell == "N/A":
        return None
    try:
        return cpulist.format_list(cpulist.parse(cell))
    except ValueError:
        warnings.append(f"GPU{gpu}: {what} {cell!r} is not readable and was left out.")
        return None


def _check_symmetry(table: list[tuple[str, ...]]) -> None:
    for i, row in enumerate(table):
        for j in range(i):
            if row[j] != table[j][i]:
                raise TopologyError(
                    f"the matrix is damaged: GPU{i} to GPU{j} reads {row[j]}, GPU{j} to GPU{i} "
                    f"reads {table[j][i]}; {_TAKE_AGAIN}"
                )
