// What docs/identity.md says, in another language: the digest of a namespace and the keys of a sequence.
const { createHash } = require("node:crypto");

const tag = (letters) => Buffer.concat([Buffer.from(`kvs.${letters}`, "latin1"), Buffer.from([0, 1])]);
const u16 = (n) => { const b = Buffer.alloc(2); b.writeUInt16LE(n); return b; };
const u32 = (n) => { const b = Buffer.alloc(4); b.writeUInt32LE(n); return b; };
const u64 = (n) => { const b = Buffer.alloc(8); b.writeBigUInt64LE(BigInt(n)); return b; };
const sha256 = (...parts) => createHash("sha256").update(Buffer.concat(parts)).digest();

const text = (s) => Buffer.from(s, "utf8");
const flag = (on) => Buffer.from([on ? 1 : 0]);
const choice = (name) => text(name.toLowerCase());
const field = (number, value) => Buffer.concat([u16(number), u32(value.length), value]);

const groupBytes = (g) => Buffer.concat([
  field(1, text(g.name)), field(2, choice(g.kind)), field(3, u64(g.bytes_per_block)), field(4, u64(g.ratio)),
  field(5, u64(g.window_tokens)), field(6, flag(g.per_block)), field(7, choice(g.access)), field(8, flag(g.sharded)),
  field(9, flag(g.lossy_ok)), field(10, flag(g.resident)), field(11, u64(g.retention_s)),
]);

/** Of a namespace as OpenNamespace answered it: with every default filled in. */
function digest(ns) {
  const groups = ns.groups.map(groupBytes).map((bytes) => Buffer.concat([u32(bytes.length), bytes]));
  return sha256(
    tag("ns"), field(1, text(ns.tenant)), field(2, text(ns.model)), field(3, text(ns.revision)), field(4, text(ns.dtype)),
    field(5, text(ns.layout)), field(6, u64(ns.layout_version)), field(7, u64(ns.block_tokens)), field(8, u64(ns.tp)),
    field(9, u64(ns.pp)), field(10, choice(ns.checkpoint_policy)), field(11, u64(ns.checkpoint_period_tokens)),
    field(12, flag(ns.mutable)), field(13, Buffer.concat([u32(groups.length), ...groups])),
  );
}

/** The parent of a sequence's first block; extra keys are texts: salt, LoRA id. */
function root(namespaceDigest, extraKeys = []) {
  const keys = extraKeys.map(text).map((key) => Buffer.concat([u32(key.length), key]));
  return sha256(tag("rt"), namespaceDigest, u32(keys.length), ...keys);
}

/** One key a block; the last block may be partial and has a key over exactly its tokens. */
function blockKeys(rootKey, tokens, blockTokens) {
  const keys = [];
  for (let start = 0, parent = rootKey; start < tokens.length; start += blockTokens) {
    parent = sha256(tag("bk"), parent, ...tokens.slice(start, start + blockTokens).map(u32));
    keys.push(parent);
  }
  return keys;
}

module.exports = { digest, root, blockKeys, u64 };
