// An evaluation, or two compared: tables, plots, and the tasks, whose samples open in the view of an episode.

import { count, counted, definitions, filterField, h, options, pane } from "./dom.mjs";
import { rewardChip } from "./score.mjs";
import { Table, figures, filtered, isKnown, texts } from "./tables.mjs";

/** A picture, parsed as a document of its own: markup in it is not part of the page's scripts or styles. */
function picture({ title, says, svg }) {
  const root = document.importNode(new DOMParser().parseFromString(svg, "image/svg+xml").documentElement, true);
  root.setAttribute("role", "img");
  root.setAttribute("aria-label", `${title}. ${says}`);
  root.removeAttribute("width");
  root.removeAttribute("height");
  return h("figure.plot", {}, h("figcaption", {}, title), root);
}

function plain({ title, head, rows }) {
  const line = (kind, texts) => h("tr", {}, texts.map((text, i) => h(`${text ? kind : "td"}${i ? ".number" : ""}`, {}, text)));
  const scroll = pane("scroll", title);
  scroll.append(h("table", {}, h("thead", {}, line("th", head)), h("tbody", {}, rows.map((row) => line("td", row)))));
  return h("div.plain", {}, h("h2", {}, title), scroll);
}

export class ReportView {
  constructor({ index }) {
    const { report, episodes } = index;
    this.report = report;
    this.sampleOf = ({ samples }) => episodes[samples.flat()[0]?.[1]] ?? {};
    const names = Object.keys(report.metrics);
    const draw = () => this.draw();
    this.metric = h("select", { "aria-label": "Metric", onchange: () => this.choose() }, options(names.map((name) => [name, name])));
    this.filter = filterField("Filter the tasks", "Filter by id or question", draw);
    this.state = h("select", { "aria-label": "State", onchange: draw }, options([["", "all states"], ...report.states.map((state) => [state, state])]));
    this.shown = h("span.caption", { role: "status" });
    this.plot = h("div.chosen");
    const metrics = report.columns.map((name, i) => figures(name, (task) => task.values[this.metric.value]?.[i]));
    this.value = report.columns.length === 1 ? metrics[0] : null;
    // The name of a task leads to its samples side by side if their tokens are known, else to the first.
    const link = ({ name, samples: [first] }) => {
      if (!first.length) return name;
      const [, at] = first[0];
      const many = first.filter(([, at]) => episodes[at].tokens).length > 1;
      return h("a", { href: many ? `#siblings-${episodes[at].group}` : `#episode-${at}` }, name);
    };
    const sample = ([reward, at], i) =>
      h("a", { href: `#episode-${at}`, title: `reward ${reward}, sample ${i}: ${episodes[at].outcome}` }, rewardChip(episodes[at].reward, report.success_threshold));
    const columns = [
      { name: "Task", kind: ".name", width: [130, 1], value: ({ name }) => name, cell: link },
      { name: "State", width: [130, 0], value: ({ state }) => report.states.indexOf(state), cell: ({ state }) => state },
      ...metrics,
      ...report.facts.map((name, i) => figures(name, (task) => task.facts[i])),
      ...report.evaluations.map((name, which) => ({
        name,
        kind: ".samples",
        width: [270, 1],
        value: ({ samples }) => samples[which].length,
        cell: ({ samples }) => samples[which].map(sample),
      })),
      texts("Question", (task) => this.sampleOf(task).question, 190, 2),
      texts("Target", (task) => this.sampleOf(task).target, 100, 1),
    ];
    this.table = new Table("Tasks", columns.filter(({ value }) => report.tasks.some((task) => isKnown(value(task)))));
    this.element = h(
      "section.report",
      { "aria-label": report.name, tabindex: "0" },
      h("div.about", {}, h("h2", {}, report.headline), definitions(report.about)),
      ...report.notes.map((note) => h("p.caption", {}, note)),
      h("div.blocks", {}, report.tables.map(plain), this.plot, ...report.plots.map(picture)),
      h("h2", {}, counted(report.tasks.length, "task")),
      h("p.caption", {}, "Every answer is next to its target in the ", h("a", { href: "#overview" }, "overview"), "."),
      h("div.bar", {}, this.filter, this.state, names.length > 0 && h("label", {}, "metric of the table and its plot ", this.metric), this.shown),
      this.table.viewport,
    );
  }

  open() {
    if (!this.table.given) this.choose();
  }

  choose() {
    const plot = this.report.metrics[this.metric.value];
    this.plot.replaceChildren(plot ? picture(plot) : "");
    this.plot.hidden = !plot;
    this.draw();
  }

  draw() {
    if (this.value) this.value.name = this.metric.value || "Value";
    const { tasks } = this.report;
    const inState = tasks.filter(({ state }) => !this.state.value || state === this.state.value);
    const shown = filtered(inState, this.filter.value, (task) => `${task.name} ${this.sampleOf(task).question ?? ""}`);
    this.table.fill(shown);
    this.shown.textContent = `${count(shown.length)} of ${count(tasks.length)} shown`;
  }
}
