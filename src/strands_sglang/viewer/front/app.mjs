// The page: what it shows follows the address after #, so every place has a link.

import { PROPERTIES, available, legend } from "./colors.mjs";
import { Store } from "./data.mjs";
import { h } from "./dom.mjs";
import { EpisodeView, sequenceOf } from "./episode.mjs";
import { ReportView } from "./report.mjs";
import { Siblings } from "./siblings.mjs";
import { Credit, Drift, Overview } from "./tables.mjs";
import { Vocabulary } from "./text.mjs";

/** Read an address such as `episode-2-sequence-0-token-17`. */
export function parseAddress(hash) {
  const [view, ...rest] = hash.replace(/^#/, "").split("-");
  const place = { view };
  if (rest.length && /^\d+$/.test(rest[0])) place.number = Number(rest.shift());
  for (let i = 0; i + 1 < rest.length; i += 2) if (/^\d+$/.test(rest[i + 1])) place[rest[i]] = Number(rest[i + 1]);
  return place;
}

class SiblingsView {
  constructor(app) {
    this.app = app;
    const { groups } = app.index;
    this.group = h("select", { "aria-label": "Group", onchange: (event) => app.go(`siblings-${event.target.value}`) });
    this.color = h("select", { "aria-label": "Color by", onchange: () => this.open(this.at) });
    this.summary = h("p.caption");
    this.legend = h("span");
    this.body = h("div.aligned-body");
    this.life = h("p.caption.pointed");
    this.element = h("section.siblings", { "aria-label": "Siblings" }, h("div.bar", {}, this.group, h("label", {}, "color ", this.color), this.legend), this.summary, this.body, this.life);
    this.strip = new Siblings(this.body, {
      point: (lane, at) => this.describe(lane, at),
      choose: (lane, at) => app.go(`episode-${this.lanes[lane].episode}-sequence-0-token-${at}`),
    });
    this.groups = groups;
    this.chosen = "writer";
  }

  describe(k, at) {
    const lane = this.lanes[k];
    const entry = lane.tokens[at];
    const { vocabulary } = this.app;
    const logprob = lane.columns.logprob?.[lane.places[at]];
    const known = logprob === undefined || Number.isNaN(logprob) ? "" : ` · logprob ${logprob.toFixed(3)}`;
    this.life.replaceChildren(h("b", {}, lane.name), `: ${vocabulary.entry(entry).shown} · id ${vocabulary.ids[entry]} · token ${at}${known}`);
  }

  async open(at = this.at ?? Math.max(0, this.groups.findIndex((group) => group.episodes.length > 1))) {
    const { app } = this;
    const group = this.groups[Math.min(at, this.groups.length - 1)];
    this.at = at;
    this.chosen = this.color.value || this.chosen;
    const near = this.groups.map((_, i) => i).filter((i) => Math.abs(i - at) < 100);
    this.group.replaceChildren(...near.map((i) => h("option", { value: i, selected: i === at }, this.groups[i].name)));
    const episodes = group.episodes.slice(0, 16);
    const bodies = await Promise.all(episodes.map((i) => app.load(i)));
    const colors = Object.keys(PROPERTIES).filter((key) => bodies.some((body) => available(body.columns).includes(key)));
    if (!colors.includes(this.chosen)) this.chosen = colors[0];
    this.color.replaceChildren(...colors.map((key) => h("option", { value: key, selected: key === this.chosen }, PROPERTIES[key].label)));
    this.lanes = episodes
      .map((i, k) => ({ i, body: bodies[k], head: app.index.episodes[i] }))
      .filter(({ body }) => body.length && body.sequences.length)
      .map(({ i, body, head }) => {
        const has = available(body.columns).includes(this.chosen);
        return {
          ...sequenceOf(body, body.sequences[0].steps),
          ...{ episode: i, name: head.id, reward: head.reward, advantage: head.advantage, outcome: head.outcome },
          columns: body.columns,
          vocabulary: app.vocabulary,
          classOf: (place) => (has ? PROPERTIES[this.chosen].classOf(body.columns, place, app.index) : "") + (body.columns.trains?.[place] === 1 ? " learns" : ""),
          open: () => app.go(`episode-${i}`),
        };
      });
    this.body.hidden = this.lanes.length < 2;
    if (this.lanes.length < 2) {
      this.summary.textContent = "This prompt has one episode with tokens; siblings need two.";
      return;
    }
    const shown = this.lanes.find((lane) => available(lane.columns).includes(this.chosen));
    this.legend.replaceChildren(...(shown ? [legend(this.chosen, app.index, shown.columns)] : []));
    this.strip.show(this.lanes);
    const more = group.episodes.length - episodes.length;
    this.summary.textContent = this.strip.summary + (more > 0 ? `; ${more} more episodes are not shown here` : "");
  }
}

class App {
  constructor(index, store, vocabulary) {
    this.index = index;
    this.store = store;
    this.vocabulary = vocabulary;
    this.bodies = new Map();
    this.main = document.getElementById("main");
    this.views = {};
    document.querySelector("h1").replaceChildren(h("span", {}, index.report?.name ?? index.title));
    document.getElementById("title").append(h("span", {}, index.report ? index.title : "Recorded episodes"));
    const siblings = index.groups.some((group) => group.episodes.filter((at) => index.episodes[at].tokens).length > 1);
    this.tabs = Object.entries({
      report: [index.report, index.report?.name],
      overview: [true, "Overview"],
      episode: [index.episodes.length, "Episode"],
      siblings: [siblings, "Siblings"],
      credit: [index.credit.length, "Credit"],
      drift: [index.drift, "Drift"],
    }).flatMap(([view, [has, label]]) => (has ? [h("a", { href: `#${view}`, "data-view": view }, label)] : []));
    document.querySelector("nav").append(...this.tabs);
    document.querySelector("#help dt.views").textContent = `1 – ${this.tabs.length}`;
    window.addEventListener("hashchange", () => this.route());
    document.addEventListener("keydown", (event) => this.key(event));
    document.getElementById("theme").addEventListener("click", () => this.toggleTheme());
    document.getElementById("keys").addEventListener("click", () => document.getElementById("help").showModal());
  }

  /** The body of an episode with its columns decoded. */
  load(number) {
    if (!this.bodies.has(number)) this.bodies.set(number, this.decode(this.index.episodes[number]));
    return this.bodies.get(number);
  }

  async decode(episode) {
    const none = () => Object.fromEntries(Object.keys(episode.columns).map((name) => [name, new Uint8Array()]));
    const [body, columns] = await Promise.all([this.store.get(episode.body), episode.length ? this.store.all(episode.columns) : none()]);
    body.columns = columns;
    body.length = episode.length;
    if (columns.trains) columns.mask = columns.trains.map((sequence) => (sequence ? 1 : 0));
    columns.turn = new Uint32Array(episode.length);
    for (const turn of body.turns) {
      columns.turn.fill(turn.number, turn.prompt[0], turn.sampled[1]);
      turn.images = turn.images?.map((image) => ({ ...image, url: image.at ? `data:image/${image.format};base64,${this.store.read(image.at)}` : null }));
    }
    if (body.routing) {
      const rows = await this.store.get(body.routing.rows);
      const width = body.routing.width;
      body.experts = (place) => {
        const row = columns.routed[place];
        return row ? Array.from(rows.subarray((row - 1) * width, row * width)).join(" ") : null;
      };
    }
    return body;
  }

  view(name) {
    const kinds = { overview: Overview, episode: EpisodeView, siblings: SiblingsView, credit: Credit, drift: Drift, report: ReportView };
    if (!this.views[name]) {
      this.views[name] = new kinds[name](this);
      this.main.append(this.views[name].element);
    }
    for (const [other, view] of Object.entries(this.views)) view.element.hidden = other !== name;
    for (const link of this.tabs) {
      if (link.dataset.view === name) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
    this.name = name;
    return this.views[name];
  }

  async route() {
    const place = parseAddress(location.hash);
    const { index } = this;
    document.getElementById("banner").hidden = true;
    if (place.view === "finding" && index.findings[place.number - 1]) return this.openFinding(place.number - 1);
    if (!this.tabs.some((link) => link.dataset.view === place.view)) place.view = index.report ? "report" : index.episodes.length > 1 || index.findings.length ? "overview" : "episode";
    const kind = { episode: "episode", siblings: "group" }[place.view];
    if (kind && place.number >= index[`${kind}s`].length) {
      this.warn(`The page has no ${kind} ${place.number}.`);
      return this.view("overview").open();
    }
    if (place.view === "episode") {
      const number = place.number ?? this.views.episode?.number ?? 0;
      await this.view("episode").open(number, place);
      for (const absent of this.views.episode.absent(place)) this.warn(`The episode has no ${absent}.`);
    } else if (place.view === "siblings") {
      await this.view("siblings").open(place.number);
    } else {
      this.view(place.view).open(place.number);
    }
  }

  async openFinding(at) {
    await this.showFinding(at);
    document.getElementById("banner").dataset.finding = at + 1; // all of it is in the page now
  }

  async showFinding(at) {
    const finding = this.index.findings[at];
    this.finding = at;
    this.tell(`Finding ${at + 1}: ${finding.title}. ${finding.why}`);
    const many = this.index.findings.length;
    const next = ((at + 1) % many) + 1;
    const banner = document.getElementById("banner");
    banner.replaceChildren(
      h("b", {}, `⚑ ${finding.title}`),
      h("span", {}, `${finding.why} (${finding.where})`),
      ...(many > 1 ? [h("a", { href: `#finding-${next}` }, `${at + 1} of ${many}, next`)] : []),
    );
    banner.hidden = false;
    if (finding.episode === null) {
      if (finding.group === null) return void this.view("overview").open();
      return this.view("siblings").open(finding.group);
    }
    await this.view("episode").open(finding.episode, { sequence: finding.sequence ?? 0, turn: finding.position ?? undefined, token: finding.token ?? undefined, count: finding.count });
  }

  go(address) {
    if (location.hash === `#${address}`) this.route();
    else location.hash = address;
  }

  warn(text) {
    const banner = document.getElementById("banner");
    banner.replaceChildren(h("b", {}, text));
    banner.hidden = false;
    this.tell(text);
  }

  tell(text) {
    document.getElementById("status").textContent = text;
  }

  toggleTheme() {
    const root = document.documentElement;
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
  }

  key(event) {
    const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
    if (typing || event.ctrlKey || event.metaKey || event.altKey || document.getElementById("help").open) return;
    const episode = this.views.episode;
    const inEpisode = this.name === "episode" && episode?.body;
    const actions = {
      "?": () => document.getElementById("help").showModal(),
      d: () => this.toggleTheme(),
      f: () => this.index.findings.length && this.go(`finding-${(((this.finding ?? -1) + 1) % this.index.findings.length) + 1}`),
      ...Object.fromEntries(this.tabs.map((link, i) => [String(i + 1), () => this.go(link.dataset.view)])),
      ...(inEpisode && {
        "/": () => episode.finder.input.focus(),
        j: () => episode.nextTurn(1),
        k: () => episode.nextTurn(-1),
        c: () => episode.nextColor(),
        r: () => episode.toggleRendered(),
        "[": () => episode.number > 0 && this.go(`episode-${episode.number - 1}`),
        "]": () => episode.number + 1 < this.index.episodes.length && this.go(`episode-${episode.number + 1}`),
      }),
    };
    if (actions[event.key]) {
      event.preventDefault();
      actions[event.key]();
    }
  }
}

async function start() {
  const store = new Store((at) => document.getElementById(at).textContent);
  const index = await store.decode({ at: "index", type: "json" });
  const { ids, texts } = await store.all(index.vocabulary);
  const app = new App(index, store, new Vocabulary(ids, texts));
  document.title = index.title;
  await app.route();
  document.getElementById("loading").remove();
  document.documentElement.dataset.ready = "";
}

if (typeof document !== "undefined" && document.getElementById("index")) start();
