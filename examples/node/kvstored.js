// A small client over gRPC, in the order of docs/protocol.md. It streams bytes, as any client on another host does.
const path = require("node:path");
const grpc = require("@grpc/grpc-js");
const protoLoader = require("@grpc/proto-loader");
const { xxhash3 } = require("hash-wasm");
const { u64 } = require("./identity.js");

const PROTO = path.join(__dirname, "../../proto/kvstored/v1/kvstored.proto");
const DATA_BYTES = 1 << 20; // a message of a stream holds at most 2 MiB
const HIT = 1;

const definition = protoLoader.loadSync(PROTO, { keepCase: true, longs: String, enums: String, defaults: true });
const service = grpc.loadPackageDefinition(definition).kvstored.v1;

const checksum = async (bytes) => BigInt(`0x${await xxhash3(bytes)}`);
const deadline = (seconds) => ({ deadline: Date.now() + 1000 * seconds });
const u64At = (packed, i) => packed.readBigUInt64LE(8 * i);

class Client {
  /** `address`: host:port or unix:/path of the daemon's gRPC front. */
  constructor(address) {
    this.stub = new service.Kvstored(address, grpc.credentials.createInsecure());
  }

  call(method, request, seconds = 10) {
    return new Promise((resolve, reject) => {
      this.stub[method](request, deadline(seconds), (error, answer) => (error ? reject(error) : resolve(answer)));
    });
  }

  async open(name) {
    this.session = (await this.call("OpenSession", { client: name, protocol: 1 })).token;
  }

  /** `keys` of one path from its first block; `lastTokens`: of a partial last one, 0 where it is full. One status a key. */
  async put(namespace, keys, blocks, lastTokens = 0) {
    const sums = await Promise.all(blocks.map(checksum));
    const answered = new Promise((resolve, reject) => {
      const stream = this.stub.Put(deadline(30), (error, answer) => (error ? reject(error) : resolve(answer)));
      stream.write({ reserve: {
        session: this.session, namespace, keys: packed(keys), sizes: Buffer.concat(blocks.map((b) => u64(b.length))),
        last_valid_tokens: lastTokens, ends_path: true,
      } });
      for (const block of blocks) {
        for (let at = 0; at < block.length; at += DATA_BYTES) stream.write({ data: block.subarray(at, at + DATA_BYTES) });
      }
      stream.write({ checksums: Buffer.concat(sums.map(u64)) });
      stream.end();
    });
    return [...(await answered).status];
  }

  /** One Buffer a key, null for a miss: also where the bytes do not have their checksum. */
  async get(namespace, keys) {
    const stream = this.stub.Get({ acquire: { session: this.session, namespace, keys: packed(keys) } }, deadline(30));
    let head = null;
    const parts = [];
    for await (const message of stream) {
      if (message.failed) return keys.map(() => null);
      head = head ?? message.head;
      parts.push(message.data);
    }
    const bytes = Buffer.concat(parts);
    const blocks = [];
    for (let i = 0, at = 0; i < keys.length; i += 1) {
      const size = head.status[i] === HIT ? Number(u64At(head.sizes, i)) : 0;
      const block = bytes.subarray(at, at + size);
      at += size;
      const isGood = head.status[i] === HIT && (await checksum(block)) === u64At(head.checksums, i);
      blocks.push(isGood ? block : null);
    }
    return blocks;
  }

  match(namespace, keys, lastTokens = 0) {
    return this.call("Match", { session: this.session, namespace, keys: packed(keys), last_valid_tokens: lastTokens });
  }

  async close() {
    await this.call("CloseSession", { session: this.session });
    this.stub.close();
  }
}

const packed = (keys) => ({ packed: Buffer.concat(keys), key_bytes: keys[0].length });

module.exports = { Client, checksum, definition };
