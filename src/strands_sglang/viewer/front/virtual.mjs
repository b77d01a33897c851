// A list that keeps only the rows in the document that can be seen.

export class VirtualList {
  /** Rows are `height` px high; `render` makes the element of one. */
  constructor(viewport, height, render) {
    this.viewport = viewport;
    this.height = height;
    this.render = render;
    this.count = 0;
    this.rows = new Map();
    this.spacer = document.createElement("div");
    this.spacer.className = "spacer";
    viewport.append(this.spacer);
    viewport.addEventListener("scroll", () => this.draw(), { passive: true });
    new ResizeObserver(() => this.draw()).observe(viewport);
  }

  /** Show a list of another length, or other content. */
  reset(count) {
    this.count = count;
    this.spacer.style.height = `${count * this.height}px`;
    this.redraw();
  }

  /** Draw the rows again. */
  redraw() {
    this.spacer.replaceChildren();
    this.rows.clear();
    this.draw();
  }

  draw() {
    const { scrollTop, clientHeight } = this.viewport;
    const first = Math.max(0, Math.floor(scrollTop / this.height) - 3);
    const last = Math.min(this.count, Math.floor((scrollTop + clientHeight) / this.height) + 4);
    for (const [index, row] of this.rows) {
      if (index < first || index >= last) {
        row.remove();
        this.rows.delete(index);
      }
    }
    for (let index = first; index < last; index++) {
      if (this.rows.has(index)) continue;
      const row = this.render(index);
      row.classList.add("row");
      row.style.top = `${index * this.height}px`;
      row.style.height = `${this.height}px`;
      this.rows.set(index, row);
      this.spacer.append(row);
    }
    this.onDraw?.(Math.floor(scrollTop / this.height), clientHeight / this.height);
  }

  /** Bring a row into view: at the given share of the height if it is outside. */
  reveal(row, share = 0.3, always = false) {
    const top = row * this.height;
    const { scrollTop, clientHeight } = this.viewport;
    if (always || top < scrollTop || top + this.height > scrollTop + clientHeight) {
      this.viewport.scrollTop = Math.max(0, top - share * clientHeight);
    }
    this.draw();
  }
}
