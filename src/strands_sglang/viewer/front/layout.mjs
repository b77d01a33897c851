// Which tokens stand in which row: a fixed-width font, so that 100,000 tokens are laid out without the browser.

/**
 * One row: tokens from `start` to `stop` (positions in the sequence), or a heading above position `start`.
 *
 * @typedef {{start: number, stop: number, heading: number}} Row heading is -1 for a row of tokens
 */
export class Rows {
  constructor(starts, stops, headings) {
    this.starts = starts;
    this.stops = stops;
    this.headings = headings;
  }

  get length() {
    return this.starts.length;
  }

  /** The row that holds a position, by bisection. */
  of(position) {
    let low = 0;
    let high = this.starts.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.starts[middle] <= position) low = middle;
      else high = middle - 1;
    }
    return low;
  }
}

/**
 * Break tokens into rows.
 *
 * @param {number} count number of tokens
 * @param {(position: number) => {width: number, ends: boolean}} measure
 * @param {number} limit columns of a row
 * @param {{at: number}[]} headings positions above which a heading stands, ascending
 * @param {number} most tokens of a row
 */
export function layOut(count, measure, limit, headings = [], most = Infinity) {
  const starts = [];
  const stops = [];
  const kinds = [];
  let next = 0;
  let rowStart = 0;
  let used = 0;
  const close = (position) => {
    if (position > rowStart) {
      starts.push(rowStart);
      stops.push(position);
      kinds.push(-1);
    }
    rowStart = position;
    used = 0;
  };
  for (let i = 0; i < count; i++) {
    while (next < headings.length && headings[next].at <= i) {
      close(i);
      starts.push(i);
      stops.push(i);
      kinds.push(next++);
    }
    const { width, ends } = measure(i);
    if (used > 0 && (used + width > limit || i - rowStart >= most)) close(i);
    used += Math.min(width, limit);
    if (ends) close(i + 1);
  }
  close(count);
  for (; next < headings.length; next++) {
    starts.push(count);
    stops.push(count);
    kinds.push(next);
  }
  return new Rows(Int32Array.from(starts), Int32Array.from(stops), Int32Array.from(kinds));
}

/** First position at which sequences differ: the length of the shortest if one begins the others. */
export function firstDifference(sequences) {
  const length = Math.min(...sequences.map((sequence) => sequence.length));
  const first = sequences[0];
  for (let i = 0; i < length; i++) {
    for (let k = 1; k < sequences.length; k++) if (sequences[k][i] !== first[i]) return i;
  }
  return length;
}
