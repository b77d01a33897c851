// Which tokens stand in which row: a fixed-width font, so that 100,000 tokens are laid out without the browser.

/**
 * Break tokens into rows of at most `limit` columns and `most` tokens: from `start` to `stop`, or a heading above `start`.
 *
 * `measure` returns how wide a token is, and whether it ends a row. Headings are in the order of the tokens that they
 * stand above.
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
export function firstDifference([first, ...others]) {
  const at = first.findIndex((token, i) => others.some((other) => other[i] !== token));
  return at < 0 ? first.length : at;
}
