// Which tokens stand in which row: a fixed-width font, so that 100,000 tokens are laid out without the browser.

/**
 * Break tokens into rows: from token `start` to `stop`, or a heading above token `start`.
 *
 * @param {number} count number of tokens
 * @param {(position: number) => {width: number, ends: boolean}} measure
 * @param {number} limit columns of a row
 * @param {{at: number}[]} headings positions above which a heading stands, ascending
 * @param {number} most tokens of a row
 * @returns {{start: number, stop: number, heading?: object}[]}
 */
export function layOut(count, measure, limit, headings = [], most = Infinity) {
  const rows = [];
  let next = 0;
  let start = 0;
  let used = 0;
  const close = (stop) => {
    if (stop > start) rows.push({ start, stop });
    start = stop;
    used = 0;
  };
  const head = (at) => {
    for (; headings[next]?.at <= at; next++) {
      close(at);
      rows.push({ start: at, stop: at, heading: headings[next] });
    }
  };
  for (let i = 0; i < count; i++) {
    head(i);
    const { width, ends } = measure(i);
    if (used > 0 && (used + width > limit || i - start >= most)) close(i);
    used += Math.min(width, limit);
    if (ends) close(i + 1);
  }
  head(count);
  close(count);
  return rows;
}

/** The row that holds a position. */
export function rowOf(rows, position) {
  return Math.max(0, rows.findLastIndex(({ start }) => start <= position));
}

/** First position at which sequences differ: the length of the shortest if one begins the others. */
export function firstDifference(sequences) {
  const length = Math.min(...sequences.map((sequence) => sequence.length));
  const first = sequences[0];
  for (let i = 0; i < length; i++) {
    if (sequences.some((other) => other[i] !== first[i])) return i;
  }
  return length;
}
