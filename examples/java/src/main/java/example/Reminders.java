package example;

import com.google.protobuf.ByteString;
import com.google.rpc.ErrorInfo;
import io.grpc.Grpc;
import io.grpc.InsecureChannelCredentials;
import io.grpc.ManagedChannel;
import io.grpc.StatusRuntimeException;
import io.grpc.protobuf.StatusProto;
import io.grpc.stub.StreamObserver;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.util.ArrayList;
import java.util.List;
import java.util.UUID;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.TimeUnit;
import tickwheel.v1.Common;
import tickwheel.v1.ConsumerGrpc;
import tickwheel.v1.ConsumerOuterClass.ConsumeRequest;
import tickwheel.v1.ConsumerOuterClass.ConsumeResponse;
import tickwheel.v1.ConsumerOuterClass.DeliverBatch;
import tickwheel.v1.ConsumerOuterClass.OpenConsumer;
import tickwheel.v1.ConsumerOuterClass.Outcome;
import tickwheel.v1.ConsumerOuterClass.SettleBatch;
import tickwheel.v1.SchedulerGrpc;
import tickwheel.v1.SchedulerOuterClass.ScheduleRequest;

/** Schedules a message and consumes it. Its argument is the address of any node, host:port. */
public final class Reminders {
    private static final long PATIENCE_MS = 30_000;

    private Reminders() {}

    public static void main(String[] arguments) throws Exception {
        ManagedChannel master = schedule(arguments.length > 0 ? arguments[0] : "127.0.0.1:7700");
        try {
            consume(master);
        } finally {
            master.shutdownNow().awaitTermination(5, TimeUnit.SECONDS);
        }
    }

    private static ManagedChannel dial(String address) {
        // A master that does not answer is noticed after seconds; TCP alone can take minutes.
        return Grpc.newChannelBuilder(address, InsecureChannelCredentials.create())
                .keepAliveTime(10, TimeUnit.SECONDS)
                .keepAliveTimeout(3, TimeUnit.SECONDS)
                .build();
    }

    /**
     * Schedules one message at the master that the address leads to, and returns the master's channel. The request has a
     * producer id and a sequence: a repeat after a lost answer schedules nothing twice.
     */
    private static ManagedChannel schedule(String address) throws InterruptedException {
        var message = Common.Message.newBuilder()
                .setTopic("from-java")
                .setPayload(ByteString.copyFromUtf8("hello from Java"))
                .setDelayMs(200);
        var request = ScheduleRequest.newBuilder()
                .setMessage(message)
                .setProducerId("java-" + UUID.randomUUID())
                .setSequence(1)
                .build();
        long untilNs = System.nanoTime() + TimeUnit.MILLISECONDS.toNanos(PATIENCE_MS);
        while (true) {
            ManagedChannel channel = dial(address);
            try {
                var stub = SchedulerGrpc.newBlockingStub(channel).withDeadlineAfter(5, TimeUnit.SECONDS);
                var id = stub.schedule(request).getId();
                System.out.printf("scheduled %d-%d-%d%n", id.getWheelGroup(), id.getHour(), id.getIndex());
                return channel;
            } catch (StatusRuntimeException error) {
                channel.shutdownNow();
                boolean passing = switch (error.getStatus().getCode()) {
                    case UNAVAILABLE, DEADLINE_EXCEEDED -> true;
                    default -> false;
                };
                if (!passing || System.nanoTime() > untilNs) {
                    throw error;
                }
                String master = metadata(error, "master_address");
                if (master.isEmpty()) {
                    Thread.sleep(100);
                } else {
                    address = master;
                }
            }
        }
    }

    /** What a node says of its error under this key; empty if it says nothing or the error is not a node's. */
    private static String metadata(StatusRuntimeException error, String key) {
        var status = StatusProto.fromThrowable(error);
        for (var detail : status == null ? List.<com.google.protobuf.Any>of() : status.getDetailsList()) {
            if (detail.is(ErrorInfo.class)) {
                try {
                    return detail.unpack(ErrorInfo.class).getMetadataOrDefault(key, "");
                } catch (com.google.protobuf.InvalidProtocolBufferException broken) {
                    return "";
                }
            }
        }
        return "";
    }

    /** Takes one batch, acknowledges it, and returns once the acknowledgement is committed. */
    private static void consume(ManagedChannel master) throws Exception {
        var done = new CompletableFuture<Integer>();
        var requests = new CompletableFuture<StreamObserver<ConsumeRequest>>();
        var responses = new StreamObserver<ConsumeResponse>() {
            @Override
            public void onNext(ConsumeResponse response) {
                switch (response.getContentCase()) {
                    case DELIVER -> {
                        payloads(response.getDeliver()).forEach(payload -> System.out.println("received " + payload));
                        requests.join().onNext(acknowledgement(response.getDeliver()));
                    }
                    case SETTLED -> done.complete(response.getSettled().getSettled());
                    case MOVED -> {
                        String where = response.getMoved().getMasterAddress();
                        done.completeExceptionally(new IllegalStateException("open the stream at " + where));
                    }
                    default -> {}
                }
            }

            @Override
            public void onError(Throwable error) {
                done.completeExceptionally(error);
            }

            @Override
            public void onCompleted() {
                done.completeExceptionally(new IllegalStateException("the node ended the stream"));
            }
        };
        requests.complete(ConsumerGrpc.newStub(master).consume(responses));
        var open = OpenConsumer.newBuilder().setGroup("java-readers").addTopics("from-java").setCredits(10);
        requests.join().onNext(ConsumeRequest.newBuilder().setOpen(open).build());
        System.out.println("settled " + done.get(PATIENCE_MS, TimeUnit.MILLISECONDS));
        requests.join().onCompleted();
    }

    private static ConsumeRequest acknowledgement(DeliverBatch batch) {
        var settle = SettleBatch.newBuilder()
                .setSequence(1)
                .setGroup(batch.getGroup())
                .setTopic(batch.getTopic())
                .setOutcome(Outcome.ACK)
                .setIds(batch.getIds())
                .setAttempts(batch.getAttempts())
                .setPositions(batch.getPositions())
                .setEpoch(batch.getEpoch());
        return ConsumeRequest.newBuilder().setSettle(settle).build();
    }

    /** Cuts the records of a batch. Columns are packed little-endian arrays; a meta precedes each payload. */
    private static List<String> payloads(DeliverBatch batch) {
        ByteBuffer sizes = column(batch.getSizes());
        ByteBuffer metaSizes = column(batch.getMetaSizes());
        var found = new ArrayList<String>();
        int offset = 0;
        while (sizes.hasRemaining()) {
            int size = sizes.getInt();
            int meta = metaSizes.hasRemaining() ? metaSizes.getInt() : 0;
            found.add(batch.getRecords().substring(offset + meta, offset + size).toStringUtf8());
            offset += size;
        }
        return found;
    }

    private static ByteBuffer column(ByteString bytes) {
        return bytes.asReadOnlyByteBuffer().order(ByteOrder.LITTLE_ENDIAN);
    }
}
