// A list that keeps only the rows in the document that can be seen.

export class VirtualList {
  /**
   * @param {HTMLElement} viewport scrolls
   * @param {number} height of each row in px
   * @param {(row: number) => HTMLElement} render
   */
  constructor(viewport, height, render) {
    this.viewport = viewport;
    this.height = height;
    this.render = render;
    this.count = 0;
    this.rows = new Map();
    this.spacer = document.createElement("div");
    this.spacer.className = "spacer";
    viewport.append(this.spacer);
    this.waiting = 0;
    viewport.addEventListener("scroll", () => this.later(), { passive: true });
    new ResizeObserver(() => this.later()).observe(viewport);
  }

  /** Show a list of another length, or other content. */
  reset(count) {
    this.tops = null;
    this.lay(count, count * this.height);
  }

  /** As `reset`, with rows that are as high as their content. */
  fit(count) {
    const measured = Array.from({ length: count }, (_, row) => this.render(row));
    this.spacer.replaceChildren(...measured);
    this.tops = [0];
    for (const row of measured) this.tops.push(this.tops[this.tops.length - 1] + row.offsetHeight);
    this.spacer.replaceChildren();
    this.lay(count, this.tops[count]);
  }

  lay(count, height) {
    this.count = count;
    this.spacer.style.height = `${height}px`;
    this.redraw();
  }

  top(row) {
    return this.tops ? this.tops[row] : row * this.height;
  }

  /** The row at a distance from the top. */
  at(y) {
    if (!this.tops) return Math.floor(y / this.height);
    const next = this.tops.findIndex((top) => top > y);
    return next < 0 ? this.count : next - 1;
  }

  /** Draw the rows again. */
  redraw() {
    for (const row of this.rows.values()) row.remove();
    this.rows.clear();
    this.draw();
  }

  later() {
    if (!this.waiting) {
      this.waiting = requestAnimationFrame(() => {
        this.waiting = 0;
        this.draw();
      });
    }
  }

  draw() {
    const { scrollTop, clientHeight } = this.viewport;
    const first = Math.max(0, this.at(scrollTop) - 3);
    const last = Math.min(this.count, this.at(scrollTop + clientHeight) + 4);
    for (const [index, row] of this.rows) {
      if (index < first || index >= last) {
        row.remove();
        this.rows.delete(index);
      }
    }
    const added = document.createDocumentFragment();
    for (let index = first; index < last; index++) {
      if (this.rows.has(index)) continue;
      const row = this.render(index);
      row.classList.add("row");
      row.style.top = `${this.top(index)}px`;
      row.style.height = `${this.top(index + 1) - this.top(index)}px`;
      this.rows.set(index, row);
      added.append(row);
    }
    this.spacer.append(added);
    this.shown = [first, last];
    if (this.onDraw) this.onDraw(Math.floor(scrollTop / this.height), clientHeight / this.height);
  }

  /** Bring a row into view: at the given share of the height if it is outside. */
  reveal(row, share = 0.3, always = false) {
    const top = this.top(row);
    const { scrollTop, clientHeight } = this.viewport;
    if (always || top < scrollTop || this.top(row + 1) > scrollTop + clientHeight) {
      this.viewport.scrollTop = Math.max(0, top - share * clientHeight);
    }
    this.draw();
  }
}
