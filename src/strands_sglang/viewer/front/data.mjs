// The data of the page: base64 of deflated bytes in <script> blocks that never run, decoded at first use.

const TYPES = { u1: Uint8Array, u2: Uint16Array, u4: Uint32Array, f4: Float32Array };

/** Undo the shuffle of bytes: the first bytes of all values come first, then all second bytes, and so on. */
export function unshuffle(bytes, type) {
  const size = TYPES[type].BYTES_PER_ELEMENT;
  const count = bytes.length / size;
  const plain = new Uint8Array(bytes.length);
  for (let plane = 0; plane < size; plane++) {
    for (let i = 0, from = plane * count, to = plane; i < count; i++, from++, to += size) plain[to] = bytes[from];
  }
  return new TYPES[type](plain.buffer);
}

/** Reads the packed values of a page; each is decoded once. */
export class Store {
  /** @param {(at: string) => string} read returns the base64 text of a block */
  constructor(read) {
    this.read = read;
    this.known = new Map();
  }

  /** Return a packed value, `{at, type}`: an array, or JSON. */
  get(packed) {
    if (!this.known.has(packed.at)) this.known.set(packed.at, this.decode(packed));
    return this.known.get(packed.at);
  }

  async decode(packed) {
    const text = atob(this.read(packed.at));
    const packedBytes = new Uint8Array(text.length);
    for (let i = 0; i < text.length; i++) packedBytes[i] = text.charCodeAt(i);
    const stream = new Blob([packedBytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    const bytes = new Uint8Array(await new Response(stream).arrayBuffer());
    if (packed.type === "json") return JSON.parse(new TextDecoder().decode(bytes));
    return unshuffle(bytes, packed.type);
  }

  /** Return an object with each packed value decoded. */
  async all(columns) {
    const names = Object.keys(columns);
    const values = await Promise.all(names.map((name) => this.get(columns[name])));
    return Object.fromEntries(names.map((name, i) => [name, values[i]]));
  }
}
