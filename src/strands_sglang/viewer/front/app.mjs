// The page: what it shows follows the address after #, so every place has a link.

import { Store } from "./data.mjs";
import { h } from "./dom.mjs";
import { EpisodeView } from "./episode.mjs";
import { ReportView } from "./report.mjs";
import { Siblings } from "./siblings.mjs";
import { Credit, Drift, Overview } from "./tables.mjs";
import { Vocabulary } from "./text.mjs";

const VIEWS = { report: ReportView, overview: Overview, episode: EpisodeView, siblings: Siblings, credit: Credit, drift: Drift };

/** Read an address such as `episode-2-sequence-0-token-17`. */
export function parseAddress(hash) {
  const [view, ...rest] = hash.replace(/^#/, "").split("-");
  const place = { view };
  if (rest.length && /^\d+$/.test(rest[0])) place.number = Number(rest.shift());
  for (let i = 0; i + 1 < rest.length; i += 2) if (/^\d+$/.test(rest[i + 1])) place[rest[i]] = Number(rest[i + 1]);
  return place;
}

class App {
  constructor(index, store, vocabulary) {
    this.index = index;
    this.store = store;
    this.vocabulary = vocabulary;
    this.bodies = [];
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
    return (this.bodies[number] ??= this.decode(this.index.episodes[number]));
  }

  async decode(episode) {
    const none = () => Object.fromEntries(Object.keys(episode.columns).map((name) => [name, new Uint8Array()]));
    const [body, columns] = await Promise.all([this.store.get(episode.body), episode.length ? this.store.all(episode.columns) : none()]);
    Object.assign(body, { columns, length: episode.length, vocabulary: this.vocabulary });
    columns.turn = new Uint32Array(episode.length);
    for (const turn of body.turns) {
      columns.turn.fill(turn.number, turn.prompt[0], turn.sampled[1]);
      turn.images = turn.images.map((image) => ({ ...image, url: image.at ? `data:image/${image.format};base64,${this.store.read(image.at)}` : null }));
    }
    return body;
  }

  view(name) {
    if (!this.views[name]) {
      this.views[name] = new VIEWS[name](this);
      this.main.append(this.views[name].element);
    }
    for (const [other, view] of Object.entries(this.views)) view.element.hidden = other !== name;
    for (const link of this.tabs) link.ariaCurrent = link.dataset.view === name ? "page" : null;
    this.name = name;
    return this.views[name];
  }

  async route() {
    const place = parseAddress(location.hash);
    const { index } = this;
    this.banner();
    if (place.view === "finding" && index.findings[place.number - 1]) return this.openFinding(place.number - 1);
    if (!this.tabs.some((link) => link.dataset.view === place.view)) place.view = index.report ? "report" : index.episodes.length > 1 || index.findings.length ? "overview" : "episode";
    const kind = { episode: "episode", siblings: "group" }[place.view];
    if (kind && place.number >= index[`${kind}s`].length) {
      this.banner(`The page has no ${kind} ${place.number}.`);
      place.view = "overview";
    }
    const view = this.view(place.view);
    await view.open(place.number, place);
    for (const absent of view.absent?.(place) ?? []) this.banner(`The episode has no ${absent}.`);
  }

  async openFinding(at) {
    const { title, why, where, episode, group, sequence, position, token, count } = this.index.findings[at];
    const many = this.index.findings.length;
    const next = many > 1 && h("a", { href: `#finding-${((at + 1) % many) + 1}` }, `${at + 1} of ${many}, next`);
    this.finding = at;
    this.banner(`⚑ ${title}`, h("span", {}, `${why} (${where})`), next);
    const view = this.view(episode !== null ? "episode" : group !== null ? "siblings" : "overview");
    await view.open(episode ?? group ?? undefined, { sequence: sequence ?? 0, turn: position ?? undefined, token: token ?? undefined, count });
    document.getElementById("banner").dataset.finding = at + 1; // all of it is in the page now
  }

  go(address) {
    if (location.hash === `#${address}`) this.route();
    else location.hash = address;
  }

  /** Say something above the view; nothing clears it. */
  banner(title, ...more) {
    const banner = document.getElementById("banner");
    banner.hidden = !title;
    banner.replaceChildren(...(title ? [h("b", {}, title), ...more.filter(Boolean)] : []));
    if (title) this.tell(banner.textContent);
  }

  /** Say something to those who do not see the page. */
  tell(text) {
    document.getElementById("status").textContent = text;
  }

  toggleTheme() {
    const { style } = document.documentElement;
    const isDark = style.colorScheme ? style.colorScheme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    style.colorScheme = isDark ? "light" : "dark";
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
