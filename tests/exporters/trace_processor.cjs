// Perfetto's trace processor, as its UI runs it, behind the HTTP interface of the native one.
//
//   node trace_processor.cjs FOLDER      prints the port it listens on, on 127.0.0.1
//
// FOLDER holds the UI's engine bundle and trace_processor.wasm of one Perfetto version. The bundle is written for a web
// worker: it waits for a MessagePort and answers protobuf requests on it. We give it just that, in node.
// Beyond /status, /parse, /notify_eof and /query of the native server there is /new: forget the trace, start afresh.
'use strict';
const fs = require('fs');
const http = require('http');
const path = require('path');

const folder = process.argv[2];
const bundle = ['engine_bundle.js', 'engine_bundle.node.js'].map((name) => path.join(folder, name)).find(fs.existsSync);
const wasm = fs.readFileSync(path.join(folder, 'trace_processor.wasm'));
// Both are compiled once: each new trace needs a fresh instance only.
const compiled = new WebAssembly.Module(wasm);
const NAMES = ['self', 'XMLHttpRequest', 'WorkerGlobalScope', 'WebAssembly', 'process', 'fetch', 'console'];
const setUp = new Function(...NAMES, fs.readFileSync(bundle, 'utf8'));

// The TraceProcessorRpc methods (protos/perfetto/trace_processor/trace_processor.proto) and the fields that carry
// their argument and their result.
const METHODS = {
  '/status': {method: 10, result: 210},
  '/parse': {method: 1, argument: 101, result: 201},
  '/notify_eof': {method: 2, result: 212},
  '/query': {method: 3, argument: 103, result: 203},
};
const SEQUENCE = 1, REQUEST = 2, FATAL_ERROR = 5;

function varint(number) {
  const bytes = [];
  for (; number > 127; number = Math.floor(number / 128)) bytes.push((number % 128) | 128);
  return Buffer.from([...bytes, number]);
}

const scalar = (field, number) => Buffer.concat([varint(field * 8), varint(number)]);
const message = (field, bytes) => Buffer.concat([varint(field * 8 + 2), varint(bytes.length), bytes]);

// The length-delimited fields of one protobuf message, as [field, bytes]; scalars are passed over.
function* submessages(bytes) {
  let at = 0;
  const number = () => {
    let value = 0, scale = 1;
    for (;;) {
      const byte = bytes[at++];
      value += (byte & 127) * scale;
      if (byte < 128) return value;
      scale *= 128;
    }
  };
  while (at < bytes.length) {
    const tag = number();
    const wire = tag % 8;
    if (wire === 0) number();
    else if (wire === 1) at += 8;
    else if (wire === 5) at += 4;
    else {
      const length = number();
      yield [Math.floor(tag / 8), bytes.subarray(at, at + length)];
      at += length;
    }
  }
}

class TraceProcessor {
  constructor() {
    this.sequence = 0;
    this.answers = [];
    const fileRequest = class {
      open() {}
      send() {
        this.status = 200;
        this.response = wasm.buffer.slice(wasm.byteOffset, wasm.byteOffset + wasm.length);
      }
    };
    const assembly = Object.create(WebAssembly, {
      // A bundle that has a 64-bit build too asks whether this machine can run it, with a module that has nothing but
      // a 64-bit memory (section 5, limits flag 4). It cannot: both versions run the same, 32-bit way.
      Module: {value: class extends WebAssembly.Module {
        constructor(bytes) {
          if (bytes[8] === 5 && bytes[11] === 4) throw new Error('no 64-bit memory here');
          if (bytes.length === wasm.length) return compiled;
          super(bytes);
        }
      }},
    });
    const scope = {
      self: {location: {href: 'http://localhost/engine_bundle.js'}},
      XMLHttpRequest: fileRequest,
      WorkerGlobalScope: function () {},
      WebAssembly: assembly,
      process: undefined,
      fetch: undefined,
      console: {log() {}, info() {}, warn() {}, error: (...words) => process.stderr.write(words.join(' ') + '\n')},
    };
    setUp(...NAMES.map((name) => scope[name]));
    this.port = {onmessage: null, postMessage: (bytes) => this.answers.push(Buffer.from(bytes))};
    scope.self.onmessage({data: this.port});
  }

  // The wasm is set up in the constructor; the bundle opens it for requests one turn of the event loop later.
  static async start() {
    const processor = new TraceProcessor();
    await new Promise(setImmediate);
    return processor;
  }

  call(url, body) {
    const {method, argument, result} = METHODS[url];
    const parts = [scalar(SEQUENCE, this.sequence++), scalar(REQUEST, method)];
    if (argument) parts.push(message(argument, body));
    this.answers = [];
    this.port.onmessage({data: new Uint8Array(message(1, Buffer.concat(parts)))});
    const results = [];
    for (const answer of this.answers)
      for (const [, rpc] of submessages(answer))
        for (const [field, value] of submessages(rpc)) {
          if (field === FATAL_ERROR) throw new Error(value.toString());
          if (field === result) results.push(value);
        }
    return Buffer.concat(results);
  }
}

async function main() {
  let processor = await TraceProcessor.start();
  const server = http.createServer((request, response) => {
    const chunks = [];
    request.on('data', (chunk) => chunks.push(chunk));
    request.on('end', async () => {
      try {
        if (request.url === '/new') {
          processor = await TraceProcessor.start();
          response.end();
        } else response.end(processor.call(request.url, Buffer.concat(chunks)));
      } catch (error) {
        response.statusCode = 500;
        response.end(String(error.stack));
      }
    });
  });
  // Tests pause between requests for longer than node's patience with an idle connection.
  server.keepAliveTimeout = 0;
  server.listen(0, '127.0.0.1', () => console.log(server.address().port));
  process.stdin.on('end', () => process.exit(0)).resume(); // the tests are gone: so are we
}

main();
